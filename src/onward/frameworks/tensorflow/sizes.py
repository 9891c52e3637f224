"""TensorFlow's table for graphs that serve all sizes: where the interpreter has numbers, here are tensors."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from onward.engines.tensorflow.quiet import tensorflow as tf  # isort: skip  (other imports of it are not quiet)

from onward.engines.tensorflow import TensorFlow


class OpenSizes(TensorFlow):
    """TensorFlow while it records a graph whose sizes are not all known. Where that will run is decided later."""

    def active(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def array(self, tensor: Any) -> Any:
        """The value, or where nobody knows it the tensor itself: rows of the table that are told sizes take both."""
        known = tf.get_static_value(tensor)
        return tensor if known is None else np.asarray(known)
