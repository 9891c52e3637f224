"""Arithmetic, comparisons, and elementwise functions."""

from __future__ import annotations

import functools
import math

import numpy as np
import onnx_ir as ir

from onward.engines.framework import Operators
from onward.errors import UnsupportedError
from onward.frameworks.formulas.elementwise import COMMON, erf_inv, multiply, round_away, saturating_cast
from onward.frameworks.formulas.graph_building import cast, constant_of, dtype_of, same_operator
from onward.frameworks.formulas.reduction import where, widely
from onward.recipe.step_builder import stop_gradient

primitives = Operators()


primitives(**{name.lower(): row for name, row in COMMON.items()})
primitives(
    add=same_operator("Add"),
    add_any=same_operator("Add"),
    erf_inv=erf_inv,
    eq=same_operator("Equal"),
    logistic=same_operator("Sigmoid"),
)


primitives(
    mul=lambda op, a, b: op.And(a, b) if a.dtype is ir.DataType.BOOL else multiply(op, a, b),
    neg=widely(lambda op, x: -x),
    exp2=lambda op, x: op.Exp(x * math.log(2)),
    cbrt=lambda op, x: op.Sign(x) * op.Abs(x) ** (1 / 3),
)


@primitives.define("abs")
def absolute(op, x):
    """Return the absolute value. Its slope at 0 is 1 in JAX, and 0 for Abs."""
    return op.Where(x < 0, -x, x) if x.dtype.is_floating_point() else op.Abs(x)


@primitives.define("div")
def divide(op, a, b):
    return _by_integers(op, a, b, op.Div, lambda: op.scalar(-1, a))


@primitives.define("rem")
def remainder(op, a, b):
    return _by_integers(op, a, b, functools.partial(op.Mod, fmod=1), lambda: a)


def _by_integers(op, a, b, compute, by_zero):
    """Divide. XLA defines integer division by 0, where ONNX Runtime crashes."""
    constant = constant_of(b)
    if a.dtype.is_floating_point() or (constant is not None and constant.all()):
        return compute(a, b)
    zero = op.Equal(b, 0)
    return where(op, zero, by_zero(), compute(a, where(op, zero, op.scalar(1, b), b)))


_larger, _smaller = widely(same_operator("Max")), widely(same_operator("Min"))
primitives(max=_larger, min=_smaller)


@primitives.define("clamp")
def clamp(op, low, x, high):
    """Return `x` between bounds, at which its slope is 0."""
    if not x.dtype.is_floating_point():
        return _smaller(op, _larger(op, x, low), high)
    cut = op.Where(x <= low, low, x)
    return op.Where(cut >= high, high, cut)


@primitives.define("integer_pow")
def integer_pow(op, x, *, y):
    """Multiply by squaring as XLA does: exact for small powers, and for negative numbers."""
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
    return round_away(op, x)


def _of_numbers(compare):
    """Return a comparison also of booleans, of which False is the smaller."""

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
    """Return equality in an order where NaN equals NaN and is the largest."""
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


@primitives.define("convert_element_type")
def convert(op, x, *, new_dtype):
    narrowed = x.dtype.is_floating_point() and np.dtype(new_dtype).kind in "iu"
    return saturating_cast(op, x, np.dtype(new_dtype)) if narrowed else cast(op, x, new_dtype)


@primitives.define("reduce_precision")
def reduce_precision(op, x, *, exponent_bits, mantissa_bits):
    types = {(8, 23): "float32", (11, 52): "float64", (5, 10): "float16", (8, 7): "bfloat16"}
    narrow = types.get((exponent_bits, mantissa_bits))
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
