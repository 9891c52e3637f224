"""The elements of two tensors, compared a part at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

_PART = 1 << 20
"""Elements that are compared at a time."""


class Distance(NamedTuple):
    """How far two tensors of the same shape are from each other."""

    differ: int = 0
    """Elements that are not equal, or further apart than is allowed."""
    absolute: float = 0.0
    """The largest difference."""
    relative: float = 0.0
    """The largest difference in proportion to the larger number of the two."""


def compare_elements(a: np.ndarray, b: np.ndarray, atol: float = 0.0, rtol: float = 0.0) -> Distance:
    """NaN is equal to NaN. Differences count beyond `atol`, and `rtol` times the number in `b`."""
    one, other = a.reshape(-1), b.reshape(-1)
    parts = [_of_part(one[at : at + _PART], other[at : at + _PART], atol, rtol) for at in range(0, one.size, _PART)]
    return Distance(
        sum(part.differ for part in parts),
        max((part.absolute for part in parts), default=0.0),
        max((part.relative for part in parts), default=0.0),
    )


def _of_part(a: np.ndarray, b: np.ndarray, atol: float, rtol: float) -> Distance:
    if a.dtype == b.dtype and not a.dtype.hasobject and np.array_equal(_bits(a), _bits(b)):
        return Distance()
    if not (_is_numeric(a) and _is_numeric(b)):
        count = int(np.count_nonzero(a != b))
        return Distance(count, math.inf, math.inf) if count else Distance()
    if a.dtype == b.dtype:
        unequal = a != b
        a, b = a[unequal], b[unequal]
    if not a.size:
        return Distance()
    kind = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    with np.errstate(all="ignore"):
        x, y = a.astype(kind), b.astype(kind)
        same, apart = (np.isnan(x) & np.isnan(y)) | (x == y), np.abs(x - y)
        if a.dtype.kind in "iu" and b.dtype.kind in "iu":  # not all of them are numbers of float64
            same, apart = a == b, np.maximum(apart, 1)
        apart = np.where(same, 0.0, apart)
        apart = np.where(np.isnan(apart), np.inf, apart)
        relative = np.where(apart == 0, 0.0, apart / np.maximum(np.abs(x), np.abs(y)))
        beyond = ~same & ~(apart <= atol + rtol * np.abs(y))
    return Distance(
        int(np.count_nonzero(beyond)), float(apart.max()), float(np.nan_to_num(relative, nan=math.inf).max())
    )


def _bits(array: np.ndarray) -> np.ndarray:
    """The same bytes, in numbers that compare quickly."""
    flat = np.ascontiguousarray(array).view(np.uint8)
    return flat.view(np.uint64) if flat.size % 8 == 0 else flat


def _is_numeric(array: np.ndarray) -> bool:
    """Bfloat16 and its kin are kinds of their own."""
    return array.dtype.kind in "biufcV" and not array.dtype.hasobject and array.dtype.names is None
