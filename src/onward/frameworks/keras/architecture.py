"""The model that a configuration of Keras describes, without its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from onward.errors import UnsupportedError, first_line
from onward.frameworks.keras.capture import from_keras
from onward.model import Model

_ANY_OPTIMIZER: dict[str, Any] = {
    "module": "keras.optimizers",
    "class_name": "SGD",
    "config": {},
    "registered_name": None,
}


def from_configuration(config: Mapping[str, Any], names: Sequence[tuple[str, tuple[int, ...]]]) -> Model:
    """A training model with the layers and the loss of a configuration, and any optimizer.

    `names` are those of the variables in Keras's order, with their shapes. Keras makes nothing but its own classes.
    """
    compiled = {**config.get("compile_config", {}), "optimizer": _ANY_OPTIMIZER, "metrics": None, "run_eagerly": False}
    if not compiled.get("loss"):
        raise UnsupportedError("the model was saved without its loss", hint="give a training model with `--like`")
    made = _make_model({**config, "compile_config": compiled})
    variables = [variable for variable in made.variables if "seed_generator" not in variable.path]
    shapes = [tuple(variable.shape) for variable in variables]
    if shapes != [shape for _, shape in names]:
        raise UnsupportedError(
            "the layers of the file have other variables than are stored", hint="give the ONNX model with `--like`"
        )
    for variable, (name, _) in zip(variables, names, strict=True):
        variable._path = name  # loaded layers do not know the models around them, in which they got their names
    return from_keras(made, probe=False, approx=True)


def _make_model(config: dict[str, Any]) -> Any:
    try:
        return keras.saving.deserialize_keras_object(config, safe_mode=True)
    except Exception as error:  # nothing of ours runs here, and Keras raises whatever a layer does
        raise UnsupportedError(
            f"Keras cannot make the layers of the file: {first_line(error)}", hint="give the ONNX model with `--like`"
        ) from error
