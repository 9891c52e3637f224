"""How far apart tensors are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Arrays = Mapping[str, np.ndarray]


def distance(a: np.ndarray, b: np.ndarray, ignored: np.ndarray | None = None) -> float:
    """The largest difference of two elements, relative to the largest element; inf where one is not a number alone.

    Elements that are `ignored` are not compared.
    """
    if a.shape != b.shape:
        return np.inf
    if a.dtype.kind in "OUSb":
        return float(not np.array_equal(a, b))
    x, y = a.astype(np.float64), b.astype(np.float64)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    if ignored is not None:
        same |= ignored
    if same.all():
        return 0.0
    x, y = x[~same], y[~same]
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return np.inf
    return float(np.abs(x - y).max() / max(largest(a), largest(b)))


def largest(array: np.ndarray) -> float:
    """The size of the largest element that is a number."""
    sizes = np.abs(array.astype(np.float64))
    finite = sizes[np.isfinite(sizes)]
    return float(finite.max()) if finite.size else 0.0


def farthest(a: Arrays, b: Arrays, ignored: Arrays | None = None) -> float:
    """The largest distance of two tensors of the same name."""
    masks, names = ignored or {}, a.keys() & b.keys()
    return max((distance(np.asarray(a[n]), np.asarray(b[n]), masks.get(n)) for n in names), default=0.0)
