"""Interpolation: between the elements of a tensor, at places of a regular grid or of any."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.precision import in_float32
from onward.engines.shared.resize import as_resize

operators = Operators()


@operators.define("Resize")
@in_float32
@as_resize
def resize(x, along, extrapolation_value, mode):
    y, outside = x, np.array(False)
    for axis, matrix, beyond, picks in along:
        y = y.take(matrix.argmax(1), axis) if picks else np.moveaxis(np.moveaxis(y, axis, -1) @ matrix.T, -1, axis)
        outside = outside | beyond.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    return np.where(outside, extrapolation_value, y).astype(x.dtype)
