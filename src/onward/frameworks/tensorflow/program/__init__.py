"""Training models as SavedModels, and back, without calling a function of the file."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from onward.engines.tensorflow.quiet import tensorflow as tf  # isort: skip  (other imports of it are not quiet)

from tensorflow.core.protobuf import saved_model_pb2

from onward.errors import Error, InvalidModelError, UnsupportedError, first_line
from onward.frameworks.program.trial import step_trial
from onward.frameworks.run_files import compare, tensors_of, with_state
from onward.frameworks.tensorflow.forward import to_tensorflow
from onward.frameworks.tensorflow.program import trial_script
from onward.lowering.contract import contract_of
from onward.lowering.step import lower_for_framework
from onward.model import Model, load
from onward.model.storage.transaction import replacing
from onward.run_state.problems import Problems
from onward.transform.opset import of_one_opset

_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_STATE = "state/"


def write(model: Model, path: Path) -> list[Path]:
    """Write a SavedModel, and return the folder."""
    module = to_tensorflow(model)
    with replacing(path) as folder:
        try:
            tf.saved_model.save(module, str(folder))
        except tf.errors.OpError as error:  # TensorFlow's form of an error of the system
            raise OSError(first_line(error)) from error
        plain = of_one_opset(model)
        if len(model.steps) == 1 and (trial := step_trial(plain)):
            order = contract_of(lower_for_framework(plain, part="step")).batch  # of the arguments of `train_step`
            trial = dataclasses.replace(trial, batch={name: trial.batch[name] for name in order})
            trial.run(trial_script.__file__, folder)
    return [path]


def restore(path: Path, like: Model | None = None) -> Model:
    """Return the training model of a SavedModel, or `like`, with the values of its variables.

    No function of the SavedModel is called or loaded.
    """
    if not (path / "saved_model.pb").is_file():
        raise UnsupportedError(f"`{path}` is not a SavedModel", hint="give the folder that `tf.saved_model.save` wrote")
    model = like if like is not None else _stored_model(path)
    return with_state(model, _variables(path, model), str(path))


def _stored_model(path: Path) -> Model:
    try:
        nodes = _function(saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes()))
    except (OSError, DecodeError, IndexError) as error:
        raise InvalidModelError(f"`{path / 'saved_model.pb'}` is damaged: {first_line(error)}") from error
    if nodes is None:
        raise UnsupportedError(
            f"`{path}` does not hold a training model",
            hint="give the training model with `--like`; or give a function of `tf.saved_model.load(...)`, with a "
            "loss, to `from_tensorflow`",
        )
    return read_carried_model(nodes, str(path))[0]


def _function(saved: Any) -> Any:
    """Return the nodes of the function `training_model`; None if it is missing."""
    for graph in saved.meta_graphs:
        objects = graph.object_graph_def.nodes
        root = objects[0].children if objects else ()
        functions = [objects[child.node_id].function for child in root if child.local_name == "training_model"]
        names = {name for function in functions for name in function.concrete_functions}
        for function in graph.graph_def.library.function:
            if function.signature.name in names:
                return function.node_def
    return None


def _variables(path: Path, model: Model) -> dict[str, np.ndarray]:
    """Return the state of a training module by name, from the checkpoint in the folder."""
    try:
        reader = tf.train.load_checkpoint(str(path / "variables" / "variables"))
        dtypes = reader.get_variable_to_dtype_map()
        shapes = reader.get_variable_to_shape_map()
        stored = {_name(key): key for key in shapes if key.startswith(_STATE) and key.endswith(_VALUE)}
        problems = Problems(f"the state of `{path}`")  # before arrays are read, which may be huge
        headers = {
            name: SimpleNamespace(shape=shapes[key], dtype=np.dtype(dtypes[key].as_numpy_dtype))
            for name, key in stored.items()
        }
        compare(problems, headers, tensors_of(model, stored))
        problems.refuse()
        return {name: np.asarray(reader.get_tensor(key)) for name, key in stored.items()}
    except (tf.errors.OpError, OSError, LookupError, ValueError, TypeError, RuntimeError) as error:
        if isinstance(error, Error):
            raise
        raise InvalidModelError(
            f"the variables of `{path}` cannot be read: {first_line(error)}",
            hint="copy the whole folder again, or save it anew with `tf.saved_model.save`",
        ) from error


def _name(key: str) -> str:
    """Decode a key of a checkpoint, which has `..` for a dot and `.S` for a slash."""
    plain = key.removeprefix(_STATE).removesuffix(_VALUE)
    return re.sub(r"\.([.S])", lambda match: "." if match[1] == "." else "/", plain)


_MOST = 2**31 - 1  # bytes: the largest protobuf, so of an ONNX file


def is_training_module(module: Any) -> bool:
    """True for a module of `to_tensorflow`, or one loaded from its SavedModel."""
    return hasattr(module, "training_model") and hasattr(module, "state")


def restore_model(module: Any) -> Model:
    """Return the training model of a module with the current values of its variables."""
    graph = module.training_model.get_concrete_function().graph.as_graph_def()
    inner = (node for function in graph.library.function for node in function.node_def)  # of a loaded module
    model, step = read_carried_model([*graph.node, *inner], "the module")
    for name, variable in module.state.items():
        model.set(name, variable.numpy(), step)
    return model


def read_carried_model(nodes: Iterable[Any], of: str) -> tuple[Model, int]:
    """Return the model and the step that `training_model` returns, which are constants."""
    try:
        constants = [tf.make_ndarray(node.attr["value"].tensor) for node in nodes if node.op == "Const"]
        packed = next(bytes(array.item()) for array in constants if array.dtype == object and array.size == 1)
        step = next((int(array) for array in constants if array.dtype.kind == "i" and array.size == 1), 0)
        unpacked = zlib.decompressobj().decompress(packed, _MOST)
    except (TypeError, ValueError, StopIteration, zlib.error) as error:
        raise InvalidModelError(f"the training model in {of} is damaged: {first_line(error)}") from error
    return load(unpacked), step
