"""Training models as SavedModels, and back."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from onward.run.tensorflow.quiet import tensorflow as tf  # isort: skip  (other imports of it are not quiet)

from tensorflow.core.protobuf import saved_model_pb2

from onward.convert.files import refilled
from onward.convert.tensorflow.module import to_tensorflow
from onward.errors import InvalidModelError, first_line
from onward.model import Model, read
from onward.model.storage.replacement import replacing

_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_STATE = "state/"


def write(model: Model, path: Path) -> list[Path]:
    """Write a SavedModel; the folder."""
    module = to_tensorflow(model)
    with replacing(path) as folder:
        try:
            tf.saved_model.save(module, str(folder))
        except tf.errors.OpError as error:  # what TensorFlow makes of an error of the system
            raise OSError(first_line(error)) from error
    return [path]


def restore(path: Path, like: Model | None = None) -> Model:
    """The training model that a SavedModel of one holds, or `like`, with the values that its variables have.

    Both are read from the files: no function of the SavedModel is called.
    """
    return refilled(like if like is not None else _model(path), _variables(path), str(path))


def _model(path: Path) -> Model:
    """What `training_model` would return: it is a constant."""
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((path / "saved_model.pb").read_bytes())
    for graph in saved.meta_graphs:
        objects = graph.object_graph_def.nodes
        kept = [objects[child.node_id] for child in objects[0].children if child.local_name == "training_model"]
        names = {name for one in kept for name in one.function.concrete_functions}
        for function in graph.graph_def.library.function:
            if function.signature.name in names:
                return read(zlib.decompress(_text_in(function)))
    raise InvalidModelError(
        f"`{path}` does not hold a training model", hint="give the training model that it was made of: `--like`"
    )


def _text_in(function: Any) -> bytes:
    constants = [tf.make_ndarray(node.attr["value"].tensor) for node in function.node_def if node.op == "Const"]
    return next(bytes(array.item()) for array in constants if array.dtype == object)


def _variables(path: Path) -> dict[str, np.ndarray]:
    """The state of a training module by name, from the checkpoint that lies in the folder."""
    reader = tf.train.load_checkpoint(str(path / "variables" / "variables"))
    names = [name for name in reader.get_variable_to_shape_map() if name.startswith(_STATE) and name.endswith(_VALUE)]
    return {_unescaped(name.removeprefix(_STATE).removesuffix(_VALUE)): reader.get_tensor(name) for name in names}


def _unescaped(name: str) -> str:
    """A checkpoint has `..` for a dot, and `.S` for a slash."""
    return re.sub(r"\.([.S])", lambda found: "." if found[1] == "." else "/", name)
