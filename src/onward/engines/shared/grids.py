"""Values between the elements of a grid."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.shared.arrays import is_float, place_along, xp
from onward.engines.shared.resize import as_resize

operators = Operators()


@operators.define("Resize")
@as_resize
def resize(x, along, extrapolation_value, mode):
    for axis, matrix, outside, picks in along:
        x = xp.take(x, matrix.argmax(1), axis) if picks else _combine(x, matrix, axis)
        if outside.any():
            x = xp.where(place_along(outside, axis, x.ndim), extrapolation_value, x).astype(x.dtype)
    return x


def _combine(x, matrix, axis):
    """New elements along an axis, each a weighted sum of the old ones."""
    exact = np.promote_types(x.dtype, np.float32)
    y = xp.moveaxis(xp.tensordot(x.astype(exact), matrix.astype(exact), (axis, 1)), -1, axis)
    return y.astype(x.dtype) if is_float(x.dtype) else xp.rint(y).astype(x.dtype)
