"""Elementwise operators for which Keras has no function of numpy's name. A known number comes as one of Python."""

from __future__ import annotations

import functools

from keras import ops

from onward.engines.framework import Operators
from onward.engines.keras.values import available, dtype_of, is_float

operators = Operators()


@operators.define("Add")
def plus(a, b):
    """Not `ops.add`: that of TensorFlow takes (1, n, 1) for a bias along the last axis if that has n elements, too."""
    return a + b if hasattr(a, "dtype") or hasattr(b, "dtype") else ops.add(a, b)


@operators.define("Div")
def divide(a, b):
    if not hasattr(a, "dtype") and not hasattr(b, "dtype"):  # sizes
        a = ops.convert_to_tensor(a)
    if is_float(a if hasattr(a, "dtype") else b):
        return ops.divide(a, b)
    towards_zero = ops.sign(a) * ops.sign(b)
    return ops.cast(ops.floor_divide(ops.abs(a), ops.abs(b)), dtype_of(a)) * ops.cast(towards_zero, dtype_of(a))


@operators.define("Mod")
def remainder(a, b, *, fmod=0):
    return ops.fmod(a, b) if fmod else ops.mod(a, b)


@operators.define("Pow")
def power(x, exponent):
    """Where both are 0, the power is 1, and its slope 0."""
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
    sought = {(1, 1): ops.isinf, (1, 0): ops.isneginf, (0, 1): ops.isposinf}
    found = sought.get((detect_negative, detect_positive))
    return ops.zeros_like(x, "bool") if found is None else found(x)


@operators.define("BitShift")
def shift(x, places, *, direction):
    return ops.left_shift(x, places) if direction == "LEFT" else ops.right_shift(x, places)


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
    """At a bound the slope is that of x."""
    if is_relu6:
        return ops.relu6(x)
    x = x if low is None else ops.where(x < low, low, x)
    return x if high is None else ops.where(x > high, high, x)
