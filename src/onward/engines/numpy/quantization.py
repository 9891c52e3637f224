"""Numbers of few bits, with a scale and a zero point."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onward.engines.framework import Operators
from onward.engines.numpy.elementwise import convert
from onward.engines.numpy.precision import is_float, widen

operators = Operators()


@operators.define("QuantizeLinear")
def quantize_linear(x, scale, zero=None, *, axis, block_size, output_dtype, precision, saturate):
    kind = ir.DataType(output_dtype or ir.DataType.UINT8).numpy() if zero is None else zero.dtype
    exact = ir.DataType(precision).numpy() if precision else scale.dtype
    quotient = x.astype(exact) / _broadcast_parameter(scale, x, axis, block_size).astype(exact)
    offset = 0 if zero is None else _broadcast_parameter(zero, x, axis, block_size)
    return _saturate(quotient, offset, kind, saturate)


@operators.define("DequantizeLinear")
def dequantize_linear(x, scale, zero=None, *, axis, block_size, output_dtype):
    kind = ir.DataType(output_dtype).numpy() if output_dtype else scale.dtype
    difference = _number(x)
    if zero is not None:
        difference = difference - _number(_broadcast_parameter(zero, x, axis, block_size))
    return (difference.astype(kind) * _broadcast_parameter(scale, x, axis, block_size).astype(kind)).astype(kind)


def _broadcast_parameter(parameter, x, axis, block_size):
    """A scale or zero point, one for all, one per index of an axis or one per block, so that it broadcasts to `x`."""
    if parameter.size == 1:
        return parameter.reshape(())
    if parameter.ndim == 1 and not block_size:
        return parameter.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])
    return parameter.repeat(block_size, axis).take(range(x.shape[axis]), axis)


def _number(x):
    """Of a type in which differences are exact."""
    return widen(x) if is_float(x.dtype) else x.astype(np.int64)


def _saturate(quotient, zero, kind, saturate=1):
    """Rounded to the nearest (the even one of two), moved to the zero point, and cut off where the type ends."""
    if is_float(kind):
        return convert(quotient + zero if np.any(zero) else quotient, kind, saturate)
    limits = ml_dtypes.iinfo(kind)
    moved = np.rint(quotient).astype(np.float64) + np.asarray(zero).astype(np.float64)
    return moved.clip(limits.min, limits.max).astype(kind)
