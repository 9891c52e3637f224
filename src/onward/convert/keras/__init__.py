"""Keras 3, both ways: compiled models as training models, and training models as compiled models."""

from onward.convert.keras.capture import from_keras

__all__ = ["from_keras"]
