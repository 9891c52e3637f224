"""Numbers of few bits, with a scale and a zero point."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onward.engines.framework import Operators
from onward.engines.numpy.convolution import convolved
from onward.engines.numpy.elementwise import converted
from onward.engines.numpy.precision import is_float, widened
from onward.engines.numpy.windows import windows

operators = Operators()


@operators.define("QuantizeLinear")
def quantize_linear(x, scale, zero=None, *, axis, block_size, output_dtype, precision, saturate):
    kind = ir.DataType(output_dtype or ir.DataType.UINT8).numpy() if zero is None else zero.dtype
    exact = ir.DataType(precision).numpy() if precision else scale.dtype
    quotient = x.astype(exact) / _spread(scale, x, axis, block_size).astype(exact)
    offset = 0 if zero is None else _spread(zero, x, axis, block_size)
    return _saturated(quotient, offset, kind, saturate)


@operators.define("DequantizeLinear")
def dequantize_linear(x, scale, zero=None, *, axis, block_size, output_dtype):
    kind = ir.DataType(output_dtype).numpy() if output_dtype else scale.dtype
    difference = _number(x)
    if zero is not None:
        difference = difference - _number(_spread(zero, x, axis, block_size))
    return (difference.astype(kind) * _spread(scale, x, axis, block_size).astype(kind)).astype(kind)


@operators.define("DynamicQuantizeLinear")
def dynamic_quantize_linear(x):
    low, high = np.minimum(x.min(), 0), np.maximum(x.max(), 0)
    scale = ((high - low) / 255).astype(x.dtype)
    zero = np.rint(np.clip(-low / scale, 0, 255)).astype(np.uint8)
    return _saturated(x / scale, zero, zero.dtype), scale, zero


@operators.define("QLinearMatMul")
def q_linear_mat_mul(a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero):
    product = mat_mul_integer(a, b, a_zero, b_zero)
    factor = _per_row(widened(a_scale), a) * widened(b_scale) / widened(y_scale)
    return _saturated(product * factor, y_zero, y_zero.dtype)


@operators.define("QLinearConv")
def q_linear_conv(
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, b=None, *,
    auto_pad, dilations, group, pads, strides,
):  # fmt: skip
    y = conv_integer(
        x, w, x_zero, w_zero, auto_pad=auto_pad, dilations=dilations, group=group, pads=pads, strides=strides
    )
    channels = (-1, *[1] * (x.ndim - 2))
    y = y if b is None else y + b.reshape(channels)
    factor = x_scale * w_scale.reshape(channels if w_scale.ndim else ()) / y_scale
    return _saturated(y * factor, y_zero, y_zero.dtype)


@operators.define("MatMulInteger")
def mat_mul_integer(a, b, a_zero=None, b_zero=None):
    a, b = (
        a.astype(np.int32) - (0 if a_zero is None else _per_row(a_zero, a).astype(np.int32)),
        b.astype(np.int32) - (0 if b_zero is None else b_zero.astype(np.int32)),
    )
    return a @ b


@operators.define("ConvInteger")
def conv_integer(x, w, x_zero=None, w_zero=None, *, auto_pad, dilations, group, pads, strides):
    x = x.astype(np.int32) - (0 if x_zero is None else x_zero.astype(np.int32))
    if w_zero is not None:
        w = w.astype(np.int32) - w_zero.astype(np.int32).reshape(-1, *[1] * (w.ndim - 1))
    where = windows(x.shape[2:], w.shape[2:], auto_pad=auto_pad, dilations=dilations, pads=pads, strides=strides)
    return convolved(where.of(x), w.astype(np.int32), group)


def _spread(parameter, x, axis, block_size):
    """A scale or zero point, one for all, one per index of an axis or one per block, so that it broadcasts to `x`."""
    if parameter.size == 1:
        return parameter.reshape(())
    if parameter.ndim == 1 and not block_size:
        return parameter.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])
    return parameter.repeat(block_size, axis).take(range(x.shape[axis]), axis)


def _per_row(parameter, a):
    """A vector has one element per row of `a`."""
    return parameter[:, None] if parameter.ndim == 1 and parameter.size > 1 and a.ndim > 1 else parameter


def _number(x):
    """Of a type in which differences are exact."""
    return widened(x) if is_float(x.dtype) else x.astype(np.int64)


def _saturated(quotient, zero, kind, saturate=1):
    """Rounded to the nearest (the even one of two), moved to the zero point, and cut off where the type ends."""
    if is_float(kind):
        return converted(quotient + zero if np.any(zero) else quotient, kind, saturate)
    limits = ml_dtypes.iinfo(kind)
    moved = np.rint(quotient).astype(np.float64) + np.asarray(zero).astype(np.float64)
    return moved.clip(limits.min, limits.max).astype(kind)
