"""Training models back from modules that Onward made, and from SavedModels of them, wherever they were trained."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

from onward.run.tensorflow.quiet import tensorflow as tf  # isort: skip  (other imports of it are not quiet)

from onward.errors import UnsupportedError
from onward.model import Model, read


def is_training_module(carrier: Any) -> bool:
    """Whether Onward made it, or what it was loaded from."""
    return hasattr(carrier, "training_model") and hasattr(carrier, "state")


def loaded(path: str | os.PathLike[str]) -> Any:
    """What a SavedModel holds, if Onward made it."""
    if not (Path(path) / "saved_model.pb").exists():
        raise UnsupportedError(f"`{path}` is not a SavedModel", hint="give the folder that `tf.saved_model.save` wrote")
    module = tf.saved_model.load(os.fspath(path))
    if not is_training_module(module):
        raise UnsupportedError(
            f"`{path}` does not hold a training model",
            hint="load it with `tf.saved_model.load`, and give a function of it, with a loss, to `from_tensorflow`",
        )
    return module


def restored(module: Any) -> Model:
    """The training model of a module, with the values that its variables have now."""
    along = module.training_model()
    model = read(zlib.decompress(along["onnx"].numpy()))
    for name, variable in module.state.items():
        model.set(name, variable.numpy(), int(along["step"]))
    return model
