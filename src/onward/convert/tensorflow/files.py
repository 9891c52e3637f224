"""Training models as SavedModels, and back."""

from __future__ import annotations

from pathlib import Path

from onward.run.tensorflow.quiet import tensorflow as tf  # isort: skip  (other imports of it are not quiet)

from onward.convert.tensorflow.capture import from_tensorflow
from onward.convert.tensorflow.module import to_tensorflow
from onward.model import Model


def write(model: Model, path: Path) -> list[Path]:
    """Write a SavedModel; the folder."""
    tf.saved_model.save(to_tensorflow(model), str(path))
    return [path]


def restore(path: Path, like: Model | None = None) -> Model:
    """The training model that a SavedModel of one holds, with the values that its variables have."""
    return from_tensorflow(path)
