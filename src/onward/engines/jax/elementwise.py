"""Elementwise operators, activations and quantization."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import onnx_ir as ir
from jax import lax

from onward.engines.framework import Operators
from onward.engines.jax.types import concrete_array
from onward.engines.shared.arrays import dtype_of, is_float
from onward.engines.shared.elementwise import code_powers_of_two, quantization

operators = Operators()


@operators.define("Div")
def div(a, b):
    return jnp.divide(a, b) if is_float(a.dtype) else lax.div(*jnp.broadcast_arrays(a, b))  # rounds towards 0


@operators.define("Pow")
def power(x, exponent):
    if not is_float(x.dtype):
        return jnp.power(x, exponent).astype(x.dtype)
    exponent = exponent.astype(x.dtype)
    base = jnp.where((x == 0) & (exponent == 0), 1, x)  # same power, with the derivative 0
    return jnp.power(base, exponent)


def _extreme(of_two, of_all):
    def extreme(*xs):
        if len(xs) < 3:
            return functools.reduce(of_two, xs)
        return of_all(jnp.stack(jnp.broadcast_arrays(*xs)), 0)  # ties share the gradient evenly

    return extreme


def absolute(x):
    """Return the absolute value. Its slope at 0 is 0; that of `jnp.abs` is 1."""
    return jnp.abs(jnp.where(x == 0, 0, x)) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.abs(x)


operators(Max=_extreme(jnp.maximum, jnp.max), Min=_extreme(jnp.minimum, jnp.min), Abs=absolute, Erf=lax.erf)


@operators.define("BitShift")
def bit_shift(x, bits, *, direction):
    return jnp.left_shift(x, bits) if direction == "LEFT" else jnp.right_shift(x, bits)


operators.define("onward.StopGradient")(lax.stop_gradient)


@operators.define("Cast")
def cast(x, *, to, saturate, round_mode):
    if to == ir.DataType.STRING:
        from onward.engines.numpy import Numpy

        return Numpy.operators["Cast"](concrete_array(x), to=to, saturate=saturate, round_mode=round_mode)
    return convert(x, dtype_of(to), saturate=saturate, round_mode=round_mode)


def convert(x, dtype, *, saturate=True, round_mode="up"):
    """Convert numbers. With `saturate`, float8 overflows to its largest number."""
    if dtype == jnp.float8_e8m0fnu:
        return lax.bitcast_convert_type(code_powers_of_two(x, saturate, round_mode), dtype)
    if dtype.itemsize == 1 and is_float(dtype) and saturate and is_float(x.dtype):
        limit = jnp.finfo(dtype).max.astype(np.float32)
        x = jnp.clip(x.astype(np.float32), -limit, limit)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        x = x.astype(np.int32)  # keeps the lower bits
    return x.astype(dtype)


@operators.define("CastLike")
def cast_like(x, like, *, saturate, round_mode):
    return convert(x, like.dtype, saturate=saturate, round_mode=round_mode)


@operators.define("BitCast")
def bit_cast(x, *, to):
    dtype = dtype_of(to)
    if np.bool_ in (x.dtype, dtype):  # a byte that is 0 or 1
        return x.astype(np.uint8).astype(dtype)
    return lax.bitcast_convert_type(x, dtype)


@operators.define("Clip")
def clip(x, low=None, high=None, *, is_relu6=False):
    if is_relu6:
        return jnp.where(x <= low, low, jnp.where(x >= high, high, x))
    x = x if low is None else jnp.where(x < low, low, x)  # at a bound the slope is that of x
    return x if high is None else jnp.where(x > high, high, x)


# ---- activation ------------------------------------------------------------------------------------------------------

operators(
    Relu=jax.nn.relu,
    LeakyRelu=lambda x, *, alpha: jnp.where(x > 0, x, alpha * x),
    PRelu=lambda x, slope: jnp.where(x > 0, x, slope * x),
    Elu=lambda x, *, alpha: jax.nn.elu(x, alpha),
    Celu=lambda x, *, alpha: jax.nn.celu(x, alpha),
    Selu=lambda x, *, alpha, gamma: gamma * jax.nn.elu(x, alpha),
    Gelu=lambda x, *, approximate: jax.nn.gelu(x, approximate=approximate == "tanh"),
    Mish=jax.nn.mish,
    Swish=lambda x, *, alpha: x * jax.nn.sigmoid(alpha * x),
    SwiGLU=lambda gate, x, *, alpha: gate * jax.nn.sigmoid(alpha * gate) * x,
    HardSigmoid=lambda x, *, alpha, beta: _unit(alpha * x + beta),
    HardSwish=lambda x: x * _unit(x / 6 + 0.5),
    Sigmoid=jax.nn.sigmoid,
    Softplus=jax.nn.softplus,
    Softsign=jax.nn.soft_sign,
)


def _unit(x):
    """Clip to [0, 1], with the slope 0 at the bounds."""
    return jnp.where(x <= 0, 0, jnp.where(x >= 1, 1, x)).astype(x.dtype)


@operators.define("Shrink")
def shrink(x, *, bias, lambd):
    shrunk = jnp.where(x < -lambd, x + bias, jnp.where(x > lambd, x - bias, 0))
    return shrunk.astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def softmax(x, axis):
    return jax.nn.softmax(x, axis)


@softmax.defjvp
def _softmax_jvp(axis, inputs, tangents):
    """Return 0 as the slope of NaN rows (fully masked), so that a later `Where` can replace them."""
    y, (change,) = softmax(*inputs, axis), tangents
    slope = jnp.where(jnp.isnan(y), 0, y)
    return y, slope * (change - jnp.sum(slope * change, axis, keepdims=True))


operators(
    ThresholdedRelu=lambda x, *, alpha: jnp.where(x > alpha, x, 0),
    Softmax=lambda x, *, axis: softmax(x, axis),
    LogSoftmax=lambda x, *, axis: jax.nn.log_softmax(x, axis),
)


@operators.define("Hardmax")
def hardmax(x, *, axis):
    classes = np.arange(x.shape[axis]).reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])
    return (jnp.argmax(x, axis, keepdims=True) == classes).astype(x.dtype)


# ---- quantization ----------------------------------------------------------------------------------------------------

operators(QuantizeLinear=quantization(convert))
