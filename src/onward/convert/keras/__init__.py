"""Keras 3, both ways: compiled models as training models, and training models as compiled models."""

from onward.convert.keras.capture import from_keras
from onward.convert.keras.release import to_keras

__all__ = ["from_keras", "to_keras"]
