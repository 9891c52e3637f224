"""Whole numbers in place of floats, with a scale and a zero point."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from onward.engines.framework import Operators
from onward.engines.shared.arrays import dtype_of, is_float, xp

operators = Operators()


def broadcast_parameter(parameter, x, axis, block_size):
    """A scale or zero point in a shape that broadcasts with x: one number, one per index of an axis, or per block."""
    if math.prod(parameter.shape) == 1:
        return xp.reshape(parameter, ())
    if block_size:
        return xp.repeat(parameter, block_size, axis)[tuple(map(slice, x.shape))]
    rank = len(x.shape)
    return xp.reshape(parameter, [-1 if i == axis % rank else 1 for i in range(rank)])


def quantization(convert):
    """The row of QuantizeLinear, with a function that casts, and saturates or not."""

    def quantize(x, scale, zero=None, *, axis, block_size, output_dtype, precision, saturate):
        exact = dtype_of(precision) if precision else scale.dtype
        dtype = zero.dtype if zero is not None else dtype_of(output_dtype) if output_dtype else np.dtype(np.uint8)
        steps = x.astype(exact) / broadcast_parameter(scale, x, axis, block_size).astype(exact)
        floats = is_float(dtype)
        steps = steps if floats else xp.rint(steps).astype(np.float32)
        if zero is not None:
            steps = steps + broadcast_parameter(zero, x, axis, block_size).astype(steps.dtype)
        if floats:
            return convert(steps, dtype, saturate=saturate)
        limits = ml_dtypes.iinfo(dtype)
        return xp.clip(steps, float(limits.min), float(limits.max)).astype(np.int32).astype(dtype)

    return quantize


@operators.define("DequantizeLinear")
def dequantize(x, scale, zero=None, *, axis, block_size, output_dtype):
    levels = x.astype(np.float32 if is_float(x.dtype) else np.int32)
    if zero is not None:
        levels = levels - broadcast_parameter(zero, x, axis, block_size).astype(levels.dtype)
    exact = np.promote_types(scale.dtype, np.float32)
    y = levels.astype(exact) * broadcast_parameter(scale, x, axis, block_size).astype(exact)
    return y.astype(dtype_of(output_dtype) if output_dtype else scale.dtype)
