"""Whole numbers in place of floats."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from onward.engines.framework import Operators
from onward.engines.jax.convolution import convolved, with_bias
from onward.engines.jax.elementwise import converted
from onward.engines.jax.values import dtype_of

operators = Operators()


@operators.define("QuantizeLinear")
def quantize_linear(x, scale, zero_point=None, *, axis, block_size, output_dtype, precision, saturate):
    if zero_point is not None:
        dtype = zero_point.dtype
    else:
        dtype = dtype_of(output_dtype) if output_dtype else np.dtype(np.uint8)
    exact = dtype_of(precision) if precision else scale.dtype
    steps = x.astype(exact) / _spread(scale, x, axis, block_size).astype(exact)
    return _rounded(steps, None if zero_point is None else _spread(zero_point, x, axis, block_size), dtype, saturate)


def _spread(parameter, x, axis, block_size):
    """One number for all, or for each place along an axis, or for each block along it."""
    if parameter.size == 1 and not block_size:
        return parameter.reshape(())
    if block_size:
        return jnp.repeat(parameter, block_size, axis)[tuple(map(slice, x.shape))]
    return parameter.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])


def _rounded(steps, zero_point, dtype, saturate=True):
    if jnp.issubdtype(dtype, jnp.floating):
        shifted = steps if zero_point is None else steps + zero_point.astype(steps.dtype)
        return converted(shifted, dtype, saturate=saturate)
    whole = jnp.round(steps).astype(np.float32)
    whole = whole if zero_point is None else whole + zero_point.astype(np.float32)
    limits = jnp.iinfo(dtype)
    return jnp.clip(whole, float(limits.min), float(limits.max)).astype(np.int32).astype(dtype)


@operators.define("DequantizeLinear")
def dequantize_linear(x, scale, zero_point=None, *, axis, block_size, output_dtype):
    exact = x.astype(np.float32 if jnp.issubdtype(x.dtype, jnp.floating) else np.int32)
    if zero_point is not None:
        exact = exact - _spread(zero_point, x, axis, block_size).astype(exact.dtype)
    y = exact.astype(np.float32) * _spread(scale, x, axis, block_size).astype(np.float32)
    return y.astype(dtype_of(output_dtype) if output_dtype else scale.dtype)


def _centred(x, zero_point, axis):
    """Whole numbers from zero, where all have a place."""
    if zero_point is None:
        return x.astype(np.int32)
    along = zero_point if zero_point.ndim != 1 else _spread(zero_point, x, axis, 0)
    return x.astype(np.int32) - along.astype(np.int32)


@operators.define("QLinearMatMul")
def q_linear_mat_mul(a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero):
    product = jnp.matmul(_centred(a, a_zero, -2), _centred(b, b_zero, -1))
    factor = a_scale.astype(np.float32) * b_scale.astype(np.float32) / y_scale.astype(np.float32)
    return _rounded(product * factor, y_zero, y_zero.dtype)


@operators.define("QLinearConv")
def q_linear_conv(
    x,
    x_scale,
    x_zero,
    w,
    w_scale,
    w_zero,
    y_scale,
    y_zero,
    bias=None,
    *,
    auto_pad,
    dilations=None,
    group,
    pads=None,
    strides=None,
):
    total = _convolved(_centred(x, x_zero, 1), _centred(w, w_zero, 0), auto_pad, dilations, group, pads, strides)
    factor = with_bias(jnp.zeros([1] * x.ndim, np.float32), x_scale * w_scale / y_scale)
    return _rounded(with_bias(total, bias) * factor, y_zero, y_zero.dtype)


@operators.define("MatMulInteger")
def mat_mul_integer(a, b, a_zero=None, b_zero=None):
    return jnp.matmul(_centred(a, a_zero, -2), _centred(b, b_zero, -1))


@operators.define("ConvInteger")
def conv_integer(x, w, x_zero=None, w_zero=None, *, auto_pad, dilations=None, group, pads=None, strides=None):
    return _convolved(_centred(x, x_zero, 1), _centred(w, w_zero, 0), auto_pad, dilations, group, pads, strides)


def _convolved(x, w, *settings):
    """GPUs have no convolution of such integers; in float64 it is exact, too."""
    return convolved(x.astype(np.float64), w.astype(np.float64), *settings).astype(np.int32)
