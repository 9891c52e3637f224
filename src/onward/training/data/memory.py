"""Small data are held in memory: quicker, and nothing can happen to them during a run. All data share one limit."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import numpy as np

LIMIT = 128 << 20  # bytes

_lock = threading.RLock()  # arrays may be collected, and counted, while it is held
_used = 0


def hold_in_memory(size: int, make: Callable[[], np.ndarray]) -> np.ndarray | None:
    """What `make` returns, an array of `size` bytes, if there is room for it."""
    with _lock:
        if _used + size > LIMIT:
            return None
        _count(size)
    try:
        array = make()
    except BaseException:
        _count(-size)
        raise
    weakref.finalize(array, _count, -size)
    return array


def _count(size: int) -> None:
    global _used
    with _lock:
        _used += size
