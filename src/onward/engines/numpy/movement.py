"""Operators that move elements, and make tensors of a given size."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.shared.arrays import dtype_of
from onward.engines.shared.movement import cut_for_pad

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
