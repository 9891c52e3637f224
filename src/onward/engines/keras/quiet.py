"""Import of Keras, after a quiet import of TensorFlow if that is its backend."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

_ON_TENSORFLOW = os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow"
if _ON_TENSORFLOW and "keras" not in sys.modules and importlib.util.find_spec("tensorflow"):
    importlib.import_module("onward.engines.tensorflow.quiet")

import keras  # noqa: E402

__all__ = ["keras"]
