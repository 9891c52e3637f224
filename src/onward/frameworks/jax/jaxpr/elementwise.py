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
from onward.frameworks.jax.jaxpr.builder import FLOAT_BITS
from onward.recipe.step_builder import stop_gradient

primitives = Operators()


primitives(**{name.lower(): row for name, row in COMMON.items()})
primitives(
    add=same_operator("Add"),
    add_any=same_operator("Add"),
    erf_inv=erf_inv,
    eq=same_operator("Equal"),
    logistic=same_operator("Sigmoid"),
    mul=lambda op, a, b: op.And(a, b) if a.dtype is ir.DataType.BOOL else multiply(op, a, b),
    neg=widely(lambda op, x: -x),
    exp2=lambda op, x: op.Exp(x * math.log(2)),
    cbrt=lambda op, x: op.Sign(x) * op.Abs(x) ** (1 / 3),
    round=lambda op, x, *, rounding_method: (
        op.Round(x) if rounding_method.name == "TO_NEAREST_EVEN" else round_away(op, x)
    ),
)


@primitives.define("abs")
def absolute(op, x):
    """Return the absolute value. Its slope at 0 is 1 in JAX, and 0 for Abs."""
    return op.Where(x < 0, -x, x) if x.dtype.is_floating_point() else op.Abs(x)


primitives(
    div=lambda op, a, b: _divide(op, a, b, op.Div, lambda: op.scalar(-1, a)),
    rem=lambda op, a, b: _divide(op, a, b, functools.partial(op.Mod, fmod=1), lambda: a),
)


def _divide(op, a, b, compute, by_zero):
    """Divide with XLA's result for an integer division by 0, which crashes ONNX Runtime."""
    constant = constant_of(b)
    if a.dtype.is_floating_point() or (constant is not None and constant.all()):
        return compute(a, b)
    zero = op.Equal(b, 0)
    return where(op, zero, by_zero(), compute(a, where(op, zero, op.scalar(1, b), b)))


_larger, _smaller = widely(same_operator("Max")), widely(same_operator("Min"))
primitives(max=_larger, min=_smaller)


@primitives.define("clamp")
def clamp(op, low, x, high):
    """Clip `x`. At the bounds, the slope is 0 in JAX, and 1 for Clip."""
    if not x.dtype.is_floating_point():
        return _smaller(op, _larger(op, x, low), high)
    cut = op.Where(x <= low, low, x)
    return op.Where(cut >= high, high, cut)


@primitives.define("integer_pow")
def integer_pow(op, x, *, y):
    """Multiply by squaring as XLA does: exact for small powers, also of negative numbers."""
    result, square, rest = None, x, abs(y)
    while rest:
        if rest % 2:
            result = square if result is None else result * square
        rest //= 2
        square = square * square if rest else square
    if result is None:
        return x / x if x.dtype.is_integer() else op.filled_like(x.value, 1)
    return op.Reciprocal(result) if y < 0 else result


def _of_numbers(compare):
    """Return a comparison that also takes booleans, where False is less than True."""

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


def _total_order(compare, with_nan):
    """Return a comparison in an order where NaN equals NaN and is the largest."""

    def compared(op, a, b):
        result = compare(op, a, b)
        return op.Or(result, with_nan(op, op.IsNaN(a), op.IsNaN(b))) if a.dtype.is_floating_point() else result

    return compared


primitives(
    eq_to=_total_order(same_operator("Equal"), same_operator("And")),
    lt_to=_total_order(same_operator("Less"), lambda op, a, b: op.And(b, op.Not(a))),
    le_to=_total_order(same_operator("LessOrEqual"), lambda op, a, b: b),
)


@primitives.define("select_n")
def select(op, which, *cases):
    if which.dtype is ir.DataType.BOOL:
        return where(op, which, *reversed(cases)) if len(cases) == 2 else cases[0]
    result = cases[-1]
    for i, case in reversed(list(enumerate(cases[:-1]))):
        result = where(op, op.Equal(which, i), case, result)
    return result


@primitives.define("reduce_precision")
def reduce_precision(op, x, *, exponent_bits, mantissa_bits):
    narrow = next((name for name, bits in FLOAT_BITS.items() if bits == (exponent_bits, mantissa_bits)), None)
    if narrow is None:
        raise UnsupportedError(f"no type has {exponent_bits} exponent and {mantissa_bits} mantissa bits")
    return cast(op, cast(op, x, dtype_of(narrow)), x.dtype)


primitives(
    copy=lambda op, x: x,
    name=lambda op, x: x,
    pvary=lambda op, x: x,
    sharding_constraint=lambda op, x: x,
    device_put=lambda op, *xs: xs,
    optimization_barrier=lambda op, *xs: xs,
    convert_element_type=lambda op, x, *, new_dtype: (
        saturating_cast(op, x, np.dtype(new_dtype))
        if x.dtype.is_floating_point() and np.dtype(new_dtype).kind in "iu"
        else cast(op, x, new_dtype)
    ),
    stop_gradient=lambda op, x: op.call(stop_gradient, x).like(x.value) if x.dtype.is_floating_point() else x,
)
