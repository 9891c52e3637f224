"""Memory for the state of an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_LINE = 64
"""Bytes of a line of a cache, and of the widest vectors."""


def aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array whose numbers nobody has written yet, and which begins with a line."""
    size = math.prod(shape) * dtype.itemsize
    taken = np.empty(size + _LINE, np.uint8)
    start = -taken.ctypes.data % _LINE
    return taken[start : start + size].view(dtype).reshape(shape)
