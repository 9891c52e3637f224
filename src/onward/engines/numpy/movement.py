"""Operators that move elements, and that choose elements by index."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.host import from_reference
from onward.engines.shared.arrays import dtype_of
from onward.engines.shared.movement import along, coordinates_of, cut_for_pad, unique_elements

operators = Operators()


@operators.define("Pad")
def pad(x, pads, value=None, axes=None, *, mode):
    x, widths = cut_for_pad(x, pads, axes)
    if mode != "constant":
        return np.pad(x, widths, mode)
    result = np.zeros([b + n + e for n, (b, e) in zip(x.shape, widths, strict=True)], x.dtype)
    if value is not None:
        result[...] = value
    result[tuple(slice(b, b + n) for n, (b, _) in zip(x.shape, widths, strict=True))] = x
    return result


@operators.define("EyeLike")
def eye_like(x, *, dtype, k):
    return np.eye(*x.shape, k=k).astype(x.dtype if dtype is None else dtype_of(dtype))


# ---- indexing --------------------------------------------------------------------------------------------------------

operators(Gather=lambda x, indices, *, axis: np.take(x, indices, axis))


@operators.define("ScatterElements")
def scatter_elements(x, indices, updates, *, axis, reduction):
    return _scatter(x, along(indices, axis), updates, reduction)


@operators.define("ScatterND")
def scatter_nd(x, indices, updates, *, reduction):
    return _scatter(x, coordinates_of(indices), updates, reduction)


operators(
    Compress=lambda x, condition, *, axis: np.compress(condition, x, axis),
    NonZero=lambda x: np.argwhere(x).T,
    Unique=lambda x, *, axis, sorted: unique_elements(x, axis, sorted),
    NonMaxSuppression=from_reference("NonMaxSuppression"),
)


_REDUCTIONS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _scatter(x, indices, updates, reduction):
    result = x.copy()
    if reduction == "none":
        result[indices] = updates
    else:
        _REDUCTIONS[reduction].at(result, indices, updates)
    return result
