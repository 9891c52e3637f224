"""Elementwise operators, activations and quantization."""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir
import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.shared.elementwise import broadcast_parameter
from onward.engines.tensorflow.types import FLOATS, SMALL, UNSIGNED, compute_as, dtype_of, on_host, scalar, wide

operators = Operators()


def _either(choose, reduce):
    """Return `Max` or `Min`. Equal elements share the gradient evenly."""

    def of_two(a, b):
        return tf.where(a == b, a / 2 + b / 2, choose(a, b)) if a.dtype.is_floating else choose(a, b)

    def chosen(first, *others):
        if len(others) > 1 and first.dtype.is_floating:
            shape = functools.reduce(tf.broadcast_static_shape, (x.shape for x in others), first.shape)
            return reduce(tf.stack([tf.broadcast_to(x, shape) for x in (first, *others)]), axis=0)
        return functools.reduce(of_two, others, first)

    return chosen


@tf.custom_gradient
def _quotient(a, b):
    y = a / b

    def gradient(dy):
        """Return 0 for 0 * infinity, so that a `Where` can drop an infinite quotient."""
        inverse = tf.math.reciprocal(b)
        slopes = (a, inverse), (b, -inverse * y)
        return [_sum_like(x, tf.math.multiply_no_nan(slope, dy)) for x, slope in slopes]

    return y, gradient


def _sum_like(x, dx):
    """Sum a gradient over the axes along which x was broadcast."""
    if x.shape.is_fully_defined() and x.shape == dx.shape:
        return dx
    axes, _ = tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(x), s1=tf.shape(dx))
    return tf.reshape(tf.reduce_sum(dx, axes), tf.shape(x))


operators(Div=lambda a, b: _quotient(a, b) if a.dtype.is_floating else tf.truncatediv(a, b))


@operators.define("Mod")
def mod(a, b, *, fmod):
    if not fmod:
        return tf.math.floormod(a, b)
    remainder = compute_as(tf.truncatemod, FLOATS | SMALL | UNSIGNED)(tf.stop_gradient(a), tf.stop_gradient(b))
    if not a.dtype.is_floating:
        return remainder
    # TensorFlow has no derivative of it. The added terms are 0 and have the derivative of a - n b.
    n = tf.stop_gradient(tf.round((a - remainder) / b))
    return remainder + (a - tf.stop_gradient(a)) - n * (b - tf.stop_gradient(b))


@operators.define("Pow")
def power(x, exponent):
    if x.dtype.is_floating:
        if isinstance(exponent, np.ndarray) and exponent.item() in _POWERS:
            return _POWERS[exponent.item()](x)
        exponent = tf.cast(exponent, x.dtype)
        both_zero = (x == 0) & (exponent == 0)  # 0^0 is 1, with the derivative 0
        return tf.pow(tf.where(both_zero, scalar(1, x), x), exponent)
    exponent = tf.convert_to_tensor(exponent)
    if exponent.dtype.is_floating:
        return tf.cast(tf.pow(tf.cast(x, exponent.dtype), exponent), x.dtype)
    return compute_as(tf.pow, SMALL | UNSIGNED)(x, tf.cast(exponent, x.dtype))


_POWERS = {
    0: tf.ones_like,
    1: tf.identity,
    2: tf.square,
    3: lambda x: x * x * x,
    0.5: lambda x: operators["Sqrt"](x),
    -1: lambda x: operators["Reciprocal"](x),
}
"""Known exponent -> a function that is faster and has a better derivative."""


operators(Max=_either(tf.maximum, tf.reduce_max), Min=_either(tf.minimum, tf.reduce_min))


def _with_slope(function, slope):
    """Give a function the derivative `slope(x, y)`. An infinite slope times a gradient of 0 is 0."""

    @tf.custom_gradient
    def compute(x):
        y = function(x)
        return y, lambda dy: tf.math.multiply_no_nan(slope(x, y), dy)

    return compute


operators(
    Abs=lambda x: x if x.dtype.is_unsigned else tf.abs(x),
    Sign=lambda x: tf.cast(x > 0, x.dtype) if x.dtype.is_unsigned else tf.sign(x),
    Reciprocal=_with_slope(tf.math.reciprocal, lambda x, y: -y * y),
    Sqrt=_with_slope(tf.sqrt, lambda x, y: 0.5 / y),
    Exp=_with_slope(tf.exp, lambda x, y: y),
    Log=_with_slope(tf.math.log, lambda x, y: tf.math.reciprocal(x)),
    Erf=lambda x: tf.math.erf(x) if x.dtype.is_floating else tf.cast(tf.math.erf(tf.cast(x, tf.float32)), x.dtype),
)


operators(
    Asin=_with_slope(tf.asin, lambda x, y: tf.math.rsqrt((1 - x) * (1 + x))),
    Acos=_with_slope(tf.acos, lambda x, y: -tf.math.rsqrt((1 - x) * (1 + x))),
    Sinh=_with_slope(tf.sinh, lambda x, y: tf.cosh(x)),
    Cosh=_with_slope(tf.cosh, lambda x, y: tf.sinh(x)),
    Acosh=_with_slope(tf.acosh, lambda x, y: tf.math.rsqrt((x - 1) * (x + 1))),
    Atanh=_with_slope(tf.atanh, lambda x, y: tf.math.reciprocal((1 - x) * (1 + x))),
)


@operators.define("Where")
def where(condition, x, y):
    if condition.shape.rank == 0 and x.shape == y.shape:  # returns one of them without a copy
        return tf.raw_ops.Select(condition=condition, x=x, y=y)
    return tf.where(condition, x, y)


@operators.define("BitShift")
def bit_shift(x, count, *, direction):
    """Shift bits. A count beyond the bits, or below 0, leaves only the sign."""
    last = x.dtype.size * 8 - 1
    shift = tf.bitwise.left_shift if direction == "LEFT" else tf.bitwise.right_shift
    too_far = (count < 0) | (count > last)
    if isinstance(count, np.ndarray) and not too_far:
        return shift(x, count)
    if direction == "RIGHT" and not x.dtype.is_unsigned:
        return shift(x, tf.where(too_far, scalar(last, x), count))
    return tf.where(too_far, scalar(0, x), shift(x, count))


operators.define("onward.StopGradient")(tf.stop_gradient)


@operators.define("Cast")
def cast(x, *, to, saturate, round_mode):
    dtype = dtype_of(to)
    if dtype is None:
        return on_host("Cast")(x, to=to, saturate=saturate, round_mode=round_mode)
    return tf.cast(x, dtype)


operators(CastLike=lambda x, like: tf.cast(x, like.dtype))


@operators.define("BitCast")
def bit_cast(x, *, to):
    """Cast bits. TensorFlow does not take bool, whose bytes are 0 and 1."""
    dtype = dtype_of(to)
    if dtype is None:
        return on_host("BitCast")(x, to=to)
    if x.dtype == tf.bool:
        return tf.bitcast(tf.cast(x, tf.uint8), dtype)
    return tf.cast(tf.bitcast(x, tf.uint8), tf.bool) if dtype == tf.bool else tf.bitcast(x, dtype)


@operators.define("Clip")
def clip(x, low=None, high=None, *, is_relu6=False):
    """Clip x. At a bound the gradient is that of x. If the bounds are crossed, the upper one wins."""
    if is_relu6:
        return tf.nn.relu6(x)
    x = x if low is None else tf.maximum(x, low)
    return x if high is None else tf.minimum(x, high)


# ---- activation: at a kink the derivative is that of the left side, or 0 ---------------------------------------------

operators(
    Relu=tf.nn.relu,
    LeakyRelu=lambda x, *, alpha: tf.nn.leaky_relu(x, alpha),
    PRelu=lambda x, slope: tf.where(x > 0, x, x * slope),
)


def _below_zero(x, scale, width=1.0):
    """Return scale * (exp(x / width) - 1) for x <= 0, and a finite number elsewhere."""
    return scale * tf.math.expm1(tf.minimum(x, 0) / width)


operators(
    Elu=lambda x, *, alpha: tf.nn.elu(x) if alpha == 1 else tf.where(x > 0, x, _below_zero(x, alpha)),
    Celu=lambda x, *, alpha: tf.where(x > 0, x, _below_zero(x, alpha, alpha)),
    Selu=lambda x, *, alpha, gamma: gamma * tf.where(x > 0, x, _below_zero(x, alpha)),
    Gelu=lambda x, *, approximate: tf.nn.gelu(x, approximate == "tanh"),
    Mish=lambda x: x * tf.tanh(tf.math.softplus(x)),
    Swish=lambda x, *, alpha: tf.nn.silu(x, alpha),
    SwiGLU=lambda a, b, *, alpha: tf.nn.silu(a, alpha) * b,
    HardSigmoid=lambda x, *, alpha, beta: _cut(alpha * x + beta),
    HardSwish=lambda x: x * _cut(x / 6 + 0.5),
    Sigmoid=tf.sigmoid,
    Softplus=tf.math.softplus,
    Softsign=lambda x: x / (1 + tf.abs(x)),
)


def _cut(x):
    """Clip to [0, 1], with the derivative 0 at the bounds."""
    return tf.where(x <= 0, scalar(0, x), tf.where(x >= 1, scalar(1, x), x))


def _softmax(x, axis):
    """Return the softmax. A fully masked row (-inf) is NaN, with the derivative 0 for a later `Where`."""

    @tf.custom_gradient
    def softmax(x):
        y = tf.nn.softmax(x, axis)

        def gradient(dy):
            weight = tf.where(tf.math.is_nan(y), scalar(0, y), y)
            weighted = dy * weight
            return weighted - weight * tf.reduce_sum(weighted, axis, keepdims=True)

        return y, gradient

    return softmax(x)


@operators.define("Shrink")
def shrink(x, *, bias, lambd):
    zero = tf.zeros_like(x)
    below, above = (tf.cast(bound, x.dtype) for bound in (-lambd, lambd))
    return tf.where(x < below, x + tf.cast(bias, x.dtype), tf.where(x > above, x - tf.cast(bias, x.dtype), zero))


operators(
    ThresholdedRelu=lambda x, *, alpha: tf.where(x > alpha, x, scalar(0, x)),
    Softmax=lambda x, *, axis: _softmax(x, axis),
    LogSoftmax=lambda x, *, axis: tf.nn.log_softmax(x, axis),
    Hardmax=lambda x, *, axis: tf.one_hot(tf.argmax(x, axis), x.shape[axis], axis=axis, dtype=x.dtype),
)


# ---- quantization ----------------------------------------------------------------------------------------------------

# The derivative treats rounding as the identity.
#
# Integers have no derivative in TensorFlow. So a quantized tensor has its float levels as an
# attribute, for `DequantizeLinear`.


@operators.define("QuantizeLinear")
def quantize_linear(x, scale, zero=None, *, axis, block_size, output_dtype, precision, saturate):
    number = output_dtype or (
        ir.DataType.UINT8 if zero is None else ir.DataType.from_numpy(np.dtype(zero.dtype.as_numpy_dtype))
    )
    dtype = dtype_of(number)
    if dtype is None:
        attributes = {"axis": axis, "block_size": block_size, "output_dtype": output_dtype}
        return on_host("QuantizeLinear")(x, scale, zero, precision=precision, saturate=saturate, **attributes)
    exact = dtype_of(precision) if precision else scale.dtype
    divided = wide(tf.cast(x, exact) / tf.cast(broadcast_parameter(scale, x, axis, block_size), exact))
    levels = divided + tf.stop_gradient(tf.round(divided) - divided)
    if zero is not None:
        levels += tf.cast(broadcast_parameter(zero, x, axis, block_size), levels.dtype)
    levels = tf.minimum(tf.maximum(levels, dtype.min), dtype.max)
    quantized = tf.cast(levels, dtype)
    quantized.levels = levels
    return quantized


@operators.define("DequantizeLinear")
def dequantize_linear(x, scale, zero=None, *, axis, block_size, output_dtype):
    dtype = dtype_of(output_dtype) if output_dtype else scale.dtype
    levels = getattr(x, "levels", None)
    levels = tf.cast(x, tf.int32) if levels is None else levels
    if zero is not None:
        levels -= tf.cast(broadcast_parameter(zero, x, axis, block_size), levels.dtype)
    return tf.cast(levels, dtype) * tf.cast(broadcast_parameter(scale, x, axis, block_size), dtype)
