"""Training models back from modules that Onward made, wherever they were trained. None of their functions is called."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

from onward.engines.tensorflow.quiet import tensorflow as tf  # isort: skip  (other imports of it are not quiet)

from onward.errors import InvalidModelError, first_line
from onward.model import Model, load

_MOST = 2**31 - 1
"""Bytes of a model: no file of ONNX is larger."""


def is_training_module(module: Any) -> bool:
    """Whether Onward made it, or what it was loaded from."""
    return hasattr(module, "training_model") and hasattr(module, "state")


def restore_model(module: Any) -> Model:
    """The training model of a module, with the values that its variables have now."""
    graph = module.training_model.get_concrete_function().graph
    model, step = read_carried_model(graph.as_graph_def().node, "the module")
    for name, variable in module.state.items():
        model.set(name, variable.numpy(), step)
    return model


def read_carried_model(nodes: Iterable[Any], of: str) -> tuple[Model, int]:
    """What the function `training_model` would return, by the constants in its graph: a model, and which step of it."""
    try:
        constants = [tf.make_ndarray(node.attr["value"].tensor) for node in nodes if node.op == "Const"]
        packed = next(bytes(array.item()) for array in constants if array.dtype == object and array.size == 1)
        step = next((int(array) for array in constants if array.dtype.kind == "i" and array.size == 1), 0)
        unpacked = zlib.decompressobj().decompress(packed, _MOST)
    except (TypeError, ValueError, StopIteration, zlib.error) as error:
        raise InvalidModelError(f"the training model in {of} is damaged: {first_line(error)}") from error
    return load(unpacked), step
