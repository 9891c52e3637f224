"""Whole numbers in place of floats."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from onward.engines.framework import Operators
from onward.engines.jax.elementwise import convert
from onward.engines.shared.arrays import dtype_of

operators = Operators()


@operators.define("QuantizeLinear")
def quantize_linear(x, scale, zero_point=None, *, axis, block_size, output_dtype, precision, saturate):
    if zero_point is not None:
        dtype = zero_point.dtype
    else:
        dtype = dtype_of(output_dtype) if output_dtype else np.dtype(np.uint8)
    exact = dtype_of(precision) if precision else scale.dtype
    steps = x.astype(exact) / _broadcast_parameter(scale, x, axis, block_size).astype(exact)
    return _round(
        steps, None if zero_point is None else _broadcast_parameter(zero_point, x, axis, block_size), dtype, saturate
    )


def _broadcast_parameter(parameter, x, axis, block_size):
    """One number for all, or for each place along an axis, or for each block along it."""
    if parameter.size == 1 and not block_size:
        return parameter.reshape(())
    if block_size:
        return jnp.repeat(parameter, block_size, axis)[tuple(map(slice, x.shape))]
    return parameter.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])


def _round(steps, zero_point, dtype, saturate=True):
    if jnp.issubdtype(dtype, jnp.floating):
        shifted = steps if zero_point is None else steps + zero_point.astype(steps.dtype)
        return convert(shifted, dtype, saturate=saturate)
    whole = jnp.round(steps).astype(np.float32)
    whole = whole if zero_point is None else whole + zero_point.astype(np.float32)
    limits = jnp.iinfo(dtype)
    return jnp.clip(whole, float(limits.min), float(limits.max)).astype(np.int32).astype(dtype)


@operators.define("DequantizeLinear")
def dequantize_linear(x, scale, zero_point=None, *, axis, block_size, output_dtype):
    exact = x.astype(np.float32 if jnp.issubdtype(x.dtype, jnp.floating) else np.int32)
    if zero_point is not None:
        exact = exact - _broadcast_parameter(zero_point, x, axis, block_size).astype(exact.dtype)
    y = exact.astype(np.float32) * _broadcast_parameter(scale, x, axis, block_size).astype(np.float32)
    return y.astype(dtype_of(output_dtype) if output_dtype else scale.dtype)
