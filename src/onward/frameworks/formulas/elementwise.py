"""Elementwise functions that ONNX lacks, as formulas of its operators, for all importers.

A formula agrees with the frameworks for tiny, huge, negative, infinite and NaN arguments, and so
does its derivative. A branch of a Where never computes the case of the other branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr, function
from onward.constants import constant_tensor
from onward.errors import UnsupportedError
from onward.frameworks.formulas.graph_building import cast, same_operator

# ---- exponentials and logarithms -------------------------------------------------------------------------------------


def expm1(op: Builder, x: Expr) -> Expr:
    """Return exp(x) - 1. The difference itself is 0 below 1e-8."""
    return op.Tanh(x * 0.5) * (op.Exp(x) + 1)


def log1p(op: Builder, x: Expr) -> Expr:
    """Return log(1 + x), which is 2 atanh(x / (x + 2)) near 0, where 1 + x rounds x to 0."""
    small = op.Abs(x) < 0.5
    near = op.Where(small, x, 0)
    far = op.Where(small, 1, x + 1)
    return op.Where(small, 2 * op.Atanh(near / (near + 2)), op.Log(far))


def log_add_exp(op: Builder, a: Expr, b: Expr) -> Expr:
    """Return log(exp(a) + exp(b)), also of infinities."""
    largest, difference = op.Max(a, b), a - b  # which is NaN for two infinities that are equal
    return op.Where(op.IsNaN(difference), a + b, largest + log1p(op, op.Exp(-op.Abs(difference))))


def product_or_zero(op: Builder, x: Expr, compute: str, y: Expr) -> Expr:
    """Return x log(y), x log1p(y) or x / y, and 0 where x is 0, for any y."""
    zero = op.Equal(x, 0)
    safe = op.Where(zero, 1, y)
    if compute == "divide":
        return op.Where(zero, 0, x / safe)
    return op.Where(zero, 0, x * (log1p(op, safe) if compute == "log1p" else op.Log(safe)))


# ---- the error function ----------------------------------------------------------------------------------------------

# Cephes (ndtr.c): erfc(x) = exp(-x^2) P(x) / Q(x) from 1 to 8, and R(x) / S(x) beyond. All terms are positive for
# positive x, so that nothing cancels in float32 either.
_ERFC_P = (
    2.46196981473530512524e-10, 5.64189564831068821977e-1, 7.46321056442269912687, 4.86371970985681366614e1,
    1.96520832956077098242e2, 5.26445194995477358631e2, 9.34528527171957607540e2, 1.02755188689515710272e3,
    5.57535335369399327526e2,
)  # fmt: skip
_ERFC_Q = (
    1.0, 1.32281951154744992508e1, 8.67072140885989742329e1, 3.54937778887819891062e2, 9.75708501743205489753e2,
    1.82390916687909736289e3, 2.24633760818710981792e3, 1.65666309194161350182e3, 5.57535340817727675546e2,
)  # fmt: skip
_ERFC_R = (
    5.64189583547755073984e-1, 1.27536670759978104416, 5.01905042251180477414, 6.16021097993053585195,
    7.40974269950448939160, 2.97886665372100240670,
)  # fmt: skip
_ERFC_S = (
    1.0, 2.26052863220117276590, 9.39603524938001434673, 1.20489539808096656605e1, 1.70814450747565897222e1,
    9.60896809063285878198, 3.36907645100081516050,
)  # fmt: skip
_ERFC_END = 28.0  # erfc is 0 above 27.3 even in float64; powers of larger numbers overflow in float32


@function("y", name="Erfc")
def _erfc(op: Builder, x: Expr) -> Expr:
    """Return 1 - erf(x), also where that difference rounds to 0."""
    central = x < 1
    far = op.Min(op.Where(central, 1, x), _ERFC_END)
    ratios = [_polynomial(op, far, above) / _polynomial(op, far, below) for above, below in _ERFC_RATIOS]
    tail = op.Exp(-(far * far)) * op.Where(far < 8, *ratios)
    return op.Where(central, 1 - op.Erf(x), op.Where(op.IsNaN(x), x, tail))


_ERFC_RATIOS = ((_ERFC_P, _ERFC_Q), (_ERFC_R, _ERFC_S))


def _polynomial(op: Builder, x: Expr, coefficients: tuple[float, ...]) -> Expr:
    """Evaluate by Horner's rule, the highest power first."""
    result = op.scalar(coefficients[0], x)
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


def erfc(op: Builder, x: Expr) -> Expr:
    return op.call(_erfc, x).like(x.value)


def multiply(op: Builder, a: Expr, b: Expr) -> Expr:
    """Return a product. Gelu replaces x / 2 times erfc(-x / sqrt(2)), of JAX and TensorFlow."""
    for half, tail in ((a, b), (b, a)):
        producer = tail.value.producer()
        if producer is not None and producer.op_type == _erfc.name:
            (number, x), (inner, y) = _scaled(half.value), _scaled(producer.inputs[0])
            is_root = math.isclose(inner, -math.sqrt(0.5), rel_tol=1e-3)  # bfloat16 has three digits
            if x is not None and x is y and number == 0.5 and is_root:
                return op.Gelu(op(x)).like(x)
    return op.Mul(a, b)


def _scaled(value: ir.Value | None) -> tuple[float, ir.Value | None]:
    """Split a value into a constant factor and the rest."""
    node = None if value is None else value.producer()
    if node is not None and node.op_type == "Neg":
        number, rest = _scaled(node.inputs[0])
        return -number, rest
    if node is not None and node.op_type == "Mul":
        for factor, other in (node.inputs, node.inputs[::-1]):
            tensor = constant_tensor(factor)
            if tensor is not None and tensor.size == 1:
                number, rest = _scaled(other)
                return number * float(tensor.numpy().reshape(())), rest
    return 1.0, value


_ERF_INV_CENTER = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_ERF_INV_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip


def erf_inv(op: Builder, x: Expr) -> Expr:
    """Return Giles' approximation, which XLA uses for float32."""
    if x.dtype is not ir.DataType.FLOAT:
        raise UnsupportedError("it has a formula for float32 only")
    w = -log1p(op, -(x * x))
    is_central = w < 5
    w = op.Where(is_central, w - 2.5, op.Sqrt(op.Max(w, 5)) - 3)
    polynomial = op.scalar(0, x)
    for center, tail in zip(_ERF_INV_CENTER, _ERF_INV_TAIL, strict=True):
        polynomial = polynomial * w + op.Where(is_central, op.scalar(center, x), op.scalar(tail, x))
    return op.Where(op.Equal(op.Abs(x), 1), x * math.inf, polynomial * x)


# ---- angles ----------------------------------------------------------------------------------------------------------


def atan2(op: Builder, y: Expr, x: Expr) -> Expr:
    """Return the angle of (x, y). The smaller is divided by the larger, against overflow."""
    infinite = op.And(op.IsInf(x), op.IsInf(y))
    down, left = is_negative(op, y), is_negative(op, x)
    y, x = (op.Where(infinite, op.Sign(z), z) for z in (y, x))
    steep = op.Abs(y) > op.Abs(x)
    divisor = op.Where(steep, y, x)
    angle = op.Atan(op.Where(steep, x, y) / op.Where(op.Equal(divisor, 0), 1, divisor))
    quarter, half = (op.Where(down, op.scalar(-turn, y), op.scalar(turn, y)) for turn in (math.pi / 2, math.pi))
    return op.Where(steep, quarter - angle, op.Where(left, angle + half, angle))


def is_negative(op: Builder, x: Expr) -> Expr:
    """Return the sign bit, which -0 has too."""
    return op.Or(x < 0, op.Equal(op.Reciprocal(x), -math.inf))


# ---- division and rounding -------------------------------------------------------------------------------------------


def relu6(op: Builder, x: Expr) -> Expr:
    return op.Clip(x, op.scalar(0, x), op.scalar(6, x))


def floor_mod(op: Builder, a: Expr, b: Expr) -> Expr:
    """Return the remainder with the sign of the divisor, exact also for large quotients."""
    if not _is_float(a):
        return op.Mod(a, b)
    rest = op.Mod(a, b, fmod=1)
    wrong_side = op.And(op.Not(op.Equal(rest, 0)), op.Xor(rest < 0, b < 0))
    return op.Where(wrong_side, rest + b, rest)


def floor_divide(op: Builder, a: Expr, b: Expr) -> Expr:
    return op.Floor(a / b) if _is_float(a) else (a - op.Mod(a, b)) / b


def round_away(op: Builder, x: Expr) -> Expr:
    """Round, with halves away from 0. `floor(x + 0.5)` is wrong next to 0.5 and above 2^23."""
    size = op.Abs(x)
    whole = op.Floor(size)
    return op.Sign(x) * op.Where(size - whole >= 0.5, whole + 1, whole)


def saturating_cast(op: Builder, x: Expr, dtype: np.dtype) -> Expr:
    """Cast floats to integers: clip to the range, and NaN to 0. ONNX leaves this undefined."""
    if dtype == np.uint64:  # int64 lacks its upper half, and ONNX Runtime has no Where for uint64
        return cast(op, x, dtype)
    ends = np.iinfo(dtype)
    whole = cast(op, op.Where(op.IsNaN(x), 0, x), np.int64)
    from_low = op.Where(x <= float(ends.min), np.int64(ends.min), whole)
    return cast(op, op.Where(x >= float(ends.max), np.int64(ends.max), from_low), dtype)


def _is_float(x: Expr) -> bool:
    return x.dtype is not None and x.dtype.is_floating_point()


# ---- rows that importers have in common ------------------------------------------------------------------------------

_SAME = (
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "Log", "Pow",
    "Sign", "Sin", "Sinh", "Sqrt", "Sub", "Tan", "Tanh",
)  # fmt: skip
# By the name of TensorFlow; JAX has the same in lower case.
COMMON: dict[str, Callable[..., Expr]] = {
    **{name: same_operator(name) for name in _SAME},
    "Atan2": atan2,
    "Erfc": erfc,
    "Expm1": expm1,
    "Log1p": log1p,
    "Rsqrt": lambda op, x: op.Reciprocal(op.Sqrt(x)),
    "Square": lambda op, x: x * x,
}
