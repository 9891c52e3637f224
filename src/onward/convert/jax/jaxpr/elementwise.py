"""Arithmetic, comparisons, and functions of one number."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onward.convert.graph_building import cast, dtype_of, same_operator
from onward.convert.jax.jaxpr.values import where, widely
from onward.engines.framework import Operators
from onward.errors import UnsupportedError
from onward.recipe.stop_gradient import stop_gradient

primitives = Operators()

_SAME = (
    "Abs", "Acos", "Acosh", "Add", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Div", "Erf", "Exp",
    "Floor", "Log", "Pow", "Sign", "Sin", "Sinh", "Sqrt", "Sub", "Tan", "Tanh",
)  # fmt: skip
"""Operators that primitives have the names of."""
primitives(**{name.lower(): same_operator(name) for name in _SAME})
primitives(add_any=same_operator("Add"), eq=same_operator("Equal"), logistic=same_operator("Sigmoid"))


# ---- arithmetic ------------------------------------------------------------------------------------------------------

primitives(
    mul=lambda op, a, b: op.And(a, b) if a.dtype is ir.DataType.BOOL else a * b,
    rem=lambda op, a, b: op.Mod(a, b, fmod=1),
    neg=widely(lambda op, x: -x),
    square=lambda op, x: x * x,
    rsqrt=lambda op, x: op.Reciprocal(op.Sqrt(x)),
    cbrt=lambda op, x: op.Sign(x) * op.Abs(x) ** (1 / 3),
)


_larger, _smaller = widely(same_operator("Max")), widely(same_operator("Min"))
primitives(max=_larger, min=_smaller, clamp=lambda op, low, x, high: _smaller(op, _larger(op, x, low), high))


@primitives.define("integer_pow")
def integer_pow(op, x, *, y):
    """By squaring, as XLA does: exact for small powers, and for negative numbers."""
    result, square, rest = None, x, abs(y)
    while rest:
        if rest % 2:
            result = square if result is None else result * square
        rest //= 2
        square = square * square if rest else square
    if result is None:
        return x / x if x.dtype.is_integer() else op.filled_like(x.value, 1)
    return op.Reciprocal(result) if y < 0 else result


@primitives.define("round")
def round_as(op, x, *, rounding_method):
    if rounding_method.name == "TO_NEAREST_EVEN":
        return op.Round(x)
    return op.Sign(x) * op.Floor(op.Abs(x) + 0.5)


# ---- comparisons -----------------------------------------------------------------------------------------------------


def _of_numbers(compare):
    """A comparison also of truth values, of which False is the smaller."""

    def compared(op, a, b):
        if a.dtype is ir.DataType.BOOL:
            a, b = cast(op, a, np.int32), cast(op, b, np.int32)
        return compare(op, a, b)

    return compared


primitives(
    ne=lambda op, a, b: op.Not(op.Equal(a, b)),
    lt=_of_numbers(lambda op, a, b: a < b),
    le=_of_numbers(lambda op, a, b: a <= b),
    gt=_of_numbers(lambda op, a, b: a > b),
    ge=_of_numbers(lambda op, a, b: a >= b),
    is_finite=lambda op, x: op.Abs(x) < math.inf,
)


@primitives.define("eq_to")
def equal_in_order(op, a, b):
    """Where NaN is a number, the largest."""
    return op.Or(op.Equal(a, b), op.And(op.IsNaN(a), op.IsNaN(b))) if a.dtype.is_floating_point() else op.Equal(a, b)


@primitives.define("lt_to")
def before_in_order(op, a, b):
    return op.Or(a < b, op.And(op.IsNaN(b), op.Not(op.IsNaN(a)))) if a.dtype.is_floating_point() else a < b


@primitives.define("le_to")
def not_after_in_order(op, a, b):
    return op.Or(a <= b, op.IsNaN(b)) if a.dtype.is_floating_point() else a <= b


@primitives.define("select_n")
def select(op, which, *cases):
    if which.dtype is ir.DataType.BOOL:
        return where(op, which, *reversed(cases)) if len(cases) == 2 else cases[0]
    result = cases[-1]
    for i, case in reversed(list(enumerate(cases[:-1]))):
        result = where(op, op.Equal(which, i), case, result)
    return result


# ---- functions -------------------------------------------------------------------------------------------------------

primitives(
    exp2=lambda op, x: op.Exp(x * math.log(2)),
    erfc=lambda op, x: 1 - op.Erf(x),
    expm1=lambda op, x: op.Tanh(x * 0.5) * (op.Exp(x) + 1),  # exact also where exp(x) is near 1
)


@primitives.define("log1p")
def log1p(op, x):
    """2 atanh(x / (x + 2)) where x is small. Neither branch sees what is not its own, for the sake of derivatives."""
    small = op.Abs(x) < 0.5
    near = op.Where(small, x, 0)
    far = op.Where(small, 1, x + 1)
    return op.Where(small, 2 * op.Atanh(near / (near + 2)), op.Log(far))


@primitives.define("atan2")
def atan2(op, y, x):
    angle = op.Atan(y / op.Where(op.Equal(x, 0), 1, x))
    half_turn = op.Where(y < 0, op.scalar(-math.pi, y), op.scalar(math.pi, y))
    turned = op.Where(x < 0, angle + half_turn, angle)
    return op.Where(op.Equal(x, 0), op.Sign(y) * (math.pi / 2), turned)


_ERF_INV_CENTRE = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_ERF_INV_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip


@primitives.define("erf_inv")
def erf_inv(op, x):
    """Giles' approximation, which is that of XLA for 32 bits."""
    if x.dtype is not ir.DataType.FLOAT:
        raise UnsupportedError("it is known for 32 bits only")
    w = -log1p(op, -(x * x))
    is_central = w < 5
    w = op.Where(is_central, w - 2.5, op.Sqrt(op.Max(w, 5)) - 3)
    polynomial = op.scalar(0, x)
    for centre, tail in zip(_ERF_INV_CENTRE, _ERF_INV_TAIL, strict=True):
        polynomial = polynomial * w + op.Where(is_central, op.scalar(centre, x), op.scalar(tail, x))
    return op.Where(op.Equal(op.Abs(x), 1), x * math.inf, polynomial * x)


# ---- types and marks -------------------------------------------------------------------------------------------------


@primitives.define("convert_element_type")
def convert(op, x, *, new_dtype):
    return cast(op, x, new_dtype)


@primitives.define("reduce_precision")
def reduce_precision(op, x, *, exponent_bits, mantissa_bits):
    known = {(8, 23): "float32", (11, 52): "float64", (5, 10): "float16", (8, 7): "bfloat16"}
    narrow = known.get((exponent_bits, mantissa_bits))
    if narrow is None:
        raise UnsupportedError(f"there is no type with {exponent_bits} and {mantissa_bits} bits")
    return cast(op, cast(op, x, dtype_of(narrow)), x.dtype)


primitives(
    copy=lambda op, x: x,
    name=lambda op, x: x,
    pvary=lambda op, x: x,
    sharding_constraint=lambda op, x: x,
    device_put=lambda op, *xs: xs,
    optimization_barrier=lambda op, *xs: xs,
    stop_gradient=lambda op, x: op.call(stop_gradient, x).like(x.value) if x.dtype.is_floating_point() else x,
)
