"""Elementwise operators and activations. Known numbers are Python numbers."""

from __future__ import annotations

import functools

from keras import ops

from onward.engines.framework import Operators
from onward.engines.keras.types import available, dtype_of, is_float

operators = Operators()


@operators.define("Add")
def plus(a, b):
    """Not `ops.add`, which adds (1, n, 1) along the last axis on TensorFlow if that has n elements."""
    return a + b if hasattr(a, "dtype") or hasattr(b, "dtype") else ops.add(a, b)


@operators.define("Div")
def divide(a, b):
    if not hasattr(a, "dtype") and not hasattr(b, "dtype"):  # sizes
        a = ops.convert_to_tensor(a)
    if is_float(a if hasattr(a, "dtype") else b):
        return ops.divide(a, b)
    dtype = dtype_of(a if hasattr(a, "dtype") else b)
    a, b = (x if hasattr(x, "dtype") else ops.convert_to_tensor(x, dtype) for x in (a, b))  # sizes
    return ops.cast(ops.floor_divide(ops.abs(a), ops.abs(b)), dtype) * ops.cast(ops.sign(a) * ops.sign(b), dtype)


@operators.define("Mod")
def remainder(a, b, *, fmod=0):
    return ops.fmod(a, b) if fmod else ops.mod(a, b)


@operators.define("Pow")
def power(x, exponent):
    """Return the power. 0^0 is 1, with the slope 0."""
    if hasattr(exponent, "dtype"):
        exponent = ops.cast(exponent, dtype_of(x))
        return ops.power(ops.where(ops.logical_and(x == 0, exponent == 0), ops.ones_like(x), x), exponent)
    return ops.square(x) if exponent == 2 else ops.sqrt(x) if exponent == 0.5 else ops.power(x, exponent)


@operators.define("Max")
def largest(*xs):
    return functools.reduce(ops.maximum, xs)


@operators.define("Min")
def smallest(*xs):
    return functools.reduce(ops.minimum, xs)


@operators.define("Sum")
def total(*xs):
    return functools.reduce(plus, xs)


@operators.define("Mean")
def average(*xs):
    return total(*xs) / len(xs)


operators(Erf=ops.erf)


@operators.define("IsInf")
def is_infinite(x, *, detect_negative=1, detect_positive=1):
    tests = {(1, 1): ops.isinf, (1, 0): ops.isneginf, (0, 1): ops.isposinf}
    test = tests.get((detect_negative, detect_positive))
    return ops.zeros_like(x, "bool") if test is None else test(x)


@operators.define("BitShift")
def shift(x, bits, *, direction):
    return ops.left_shift(x, bits) if direction == "LEFT" else ops.right_shift(x, bits)


@operators.define("Identity")
def same(x):
    return x


operators.define("onward.StopGradient")(ops.stop_gradient)


@operators.define("Cast")
def convert(x, *, to):
    if "int" in to and is_float(x):
        x = ops.trunc(x)
    return ops.cast(x, available(to))


@operators.define("CastLike")
def convert_like(x, like):
    return convert(x, to=dtype_of(like))


@operators.define("Clip")
def clip(x, low=None, high=None, *, is_relu6=False):
    """Clip x. At a bound the slope is that of x."""
    if is_relu6:
        return ops.relu6(x)
    x = x if low is None else ops.where(x < low, low, x)
    return x if high is None else ops.where(x > high, high, x)


# ---- activation ------------------------------------------------------------------------------------------------------

operators(Relu=ops.relu)


@operators.define("LeakyRelu")
def leaky_relu(x, *, alpha=0.01):
    return ops.where(x > 0, x, alpha * x)


@operators.define("PRelu")
def parametric_relu(x, slope):
    return ops.where(x > 0, x, slope * x)


def _below_zero(x):
    """Return min(x, 0). Backends disagree about the slope of `minimum` at 0."""
    return ops.where(x > 0, ops.zeros_like(x), x)


@operators.define("Elu")
def elu(x, *, alpha=1.0):
    return ops.where(x > 0, x, alpha * ops.expm1(_below_zero(x)))


@operators.define("Celu")
def celu(x, *, alpha=1.0):
    return ops.where(x > 0, x, alpha * ops.expm1(_below_zero(x) / alpha))


@operators.define("Selu")
def selu(x, *, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875):
    return gamma * elu(x, alpha=alpha)


@operators.define("Gelu")
def gelu(x, *, approximate="none"):
    return ops.gelu(x, approximate=approximate == "tanh")


@operators.define("Mish")
def mish(x):
    return x * ops.tanh(ops.softplus(x))


@operators.define("Swish")
def swish(x, *, alpha=1.0):
    return x * ops.sigmoid(alpha * x)


@operators.define("HardSigmoid")
def hard_sigmoid(x, *, alpha=0.2, beta=0.5):
    y = alpha * x + beta  # backends disagree about the slope of `clip` at the bounds
    return ops.where(y <= 0, ops.zeros_like(y), ops.where(y >= 1, ops.ones_like(y), y))


operators(HardSwish=ops.hard_swish, Sigmoid=ops.sigmoid, Softplus=ops.softplus, Softsign=ops.softsign)


@operators.define("Shrink")
def shrink(x, *, bias=0.0, lambd=0.5):
    return ops.where(x < -lambd, x + bias, ops.where(x > lambd, x - bias, ops.zeros_like(x)))


@operators.define("ThresholdedRelu")
def thresholded_relu(x, *, alpha=1.0):
    return ops.where(x > alpha, x, ops.zeros_like(x))


@operators.define("Softmax")
def softmax(x, *, axis=-1):
    return ops.softmax(x, axis)


@operators.define("LogSoftmax")
def log_softmax(x, *, axis=-1):
    return ops.log_softmax(x, axis)


@operators.define("Hardmax")
def hardmax(x, *, axis=-1):
    return ops.one_hot(ops.argmax(x, axis), x.shape[axis], axis=axis, dtype=dtype_of(x))
