"""Keras 3, both ways: compiled models as training models, and training models as compiled models."""

from typing import TYPE_CHECKING, Any

from onward.convert.keras.capture import from_keras

if TYPE_CHECKING:
    from onward.convert.keras.release import to_keras

__all__ = ["from_keras", "to_keras"]


def __getattr__(name: str) -> Any:
    if name == "to_keras":  # which loads TensorFlow, and `from_keras` may do without it
        from onward.convert.keras.release import to_keras

        return to_keras
    raise AttributeError(name)
