"""Keras 3, both ways: compiled models as training models, and training models as compiled models."""

import importlib.util
import os
import sys

_ON_TENSORFLOW = os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow"
if _ON_TENSORFLOW and "keras" not in sys.modules and importlib.util.find_spec("tensorflow"):
    importlib.import_module("onward.engines.tensorflow.quiet")  # Keras would import it with all that it prints

from onward.frameworks.keras.capture import from_keras  # noqa: E402
from onward.frameworks.keras.forward import to_keras  # noqa: E402

__all__ = ["from_keras", "to_keras"]
