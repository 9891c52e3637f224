"""Elementwise operators. A number that is known comes as one of Python."""

from __future__ import annotations

import functools

from keras import ops

from onward.engines.framework import Operators
from onward.engines.keras.values import available, dtype_of, is_float

operators = Operators()
operators(Add=ops.add, Sub=ops.subtract, Mul=ops.multiply)


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
    return functools.reduce(ops.add, xs)


@operators.define("Mean")
def average(*xs):
    return total(*xs) / len(xs)


_SAME = (
    "Abs", "Ceil", "Cos", "Cosh", "Equal", "Erf", "Exp", "Floor", "Greater", "IsNaN", "Less", "Log", "Reciprocal",
    "Round", "Sign", "Sin", "Sinh", "Sqrt", "Tan", "Tanh", "Where",
)  # fmt: skip
"""Operators that functions of Keras have the names of, and below those that they have others for."""
_OTHERWISE_NAMED = {
    "Acos": "arccos", "Acosh": "arccosh", "Asin": "arcsin", "Asinh": "arcsinh", "Atan": "arctan", "Atanh": "arctanh",
    "And": "logical_and", "Or": "logical_or", "Xor": "logical_xor", "Not": "logical_not", "Neg": "negative",
    "BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor", "BitwiseNot": "bitwise_not",
    "GreaterOrEqual": "greater_equal", "LessOrEqual": "less_equal",
}  # fmt: skip
operators(**{name: getattr(ops, name.lower()) for name in _SAME})
operators(**{name: getattr(ops, function) for name, function in _OTHERWISE_NAMED.items()})


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
