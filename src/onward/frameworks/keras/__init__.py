"""Keras 3, both ways: compiled models as training models, and training models as compiled models."""

import onward.engines.keras  # noqa: F401 (before Keras, which would print more)
from onward.frameworks.keras.capture import from_keras
from onward.frameworks.keras.forward import to_keras

__all__ = ["from_keras", "to_keras"]
