"""Compiled Keras 3 models as training models, and back."""

from onward.engines import keras as _engine  # noqa: F401 (before Keras, which would print more)
from onward.frameworks.keras.capture import from_keras
from onward.frameworks.keras.forward import to_keras

__all__ = ["from_keras", "to_keras"]
