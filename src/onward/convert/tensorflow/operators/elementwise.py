"""Arithmetic, comparison, functions of each element, and types."""

from __future__ import annotations

import tensorflow as tf

from onward.convert.graph_building import cast, same_operator
from onward.convert.tensorflow.graph import Refused, dtype_of
from onward.engines.framework import Operators

operators = Operators()


def _is_float(x):
    return x.dtype.is_floating_point()


_SAME = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Equal", "Erf", "Exp", "Floor",
    "IsInf", "Log", "Mul", "Neg", "Pow", "Reciprocal", "Sign", "Sin", "Sinh", "Sqrt", "Sub", "Tan",
)  # fmt: skip
"""Operations that the standard has under the same names, and below those that it has under others."""
_OTHERWISE_NAMED = {
    "Add": "Add", "AddV2": "Add", "Div": "Div", "RealDiv": "Div", "TruncateDiv": "Div", "Inv": "Reciprocal",
    "Greater": "Greater", "GreaterEqual": "GreaterOrEqual", "IsNan": "IsNaN", "Less": "Less",
    "LessEqual": "LessOrEqual", "LogicalAnd": "And", "LogicalNot": "Not", "LogicalOr": "Or", "Rint": "Round",
}  # fmt: skip
operators(**{name: same_operator(name) for name in _SAME})
operators(**{name: same_operator(operator) for name, operator in _OTHERWISE_NAMED.items()})


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def _floor_mod(op, a, b):
    return a - op.Floor(a / b) * b if _is_float(a) else op.Mod(a, b)


operators(
    AddN=lambda op, *xs: op.Sum(*xs) if len(xs) > 1 else xs[0],
    FloorDiv=lambda op, a, b: op.Floor(a / b) if _is_float(a) else (a - op.Mod(a, b)) / b,
    FloorMod=_floor_mod,
    SquaredDifference=lambda op, a, b: (a - b) * (a - b),
    Square=lambda op, x: x * x,
    Rsqrt=lambda op, x: op.Reciprocal(op.Sqrt(x)),
)


@operators.define("DivNoNan")
def div_no_nan(op, a, b):
    """0 where the divisor is 0, with a derivative of 0."""
    zero = op.Equal(b, 0)
    return op.Where(zero, 0, a / op.Where(zero, 1, b))


def _choose(op, second, a, b):
    """One of two, the second where it is not a number. Of two that tie the first has the whole gradient."""
    return op.Where(op.Or(second, op.IsNaN(b)), b, a)


operators(
    Maximum=lambda op, a, b: _choose(op, a < b, a, b) if _is_float(a) else op.Max(a, b),
    Minimum=lambda op, a, b: _choose(op, a > b, a, b) if _is_float(a) else op.Min(a, b),
)


@operators.define("ClipByValue")
def clip_by_value(op, x, low, high, *, node):
    if node.rank(1) or node.rank(2):
        raise Refused("ONNX has the same bounds for all elements")
    return op.Clip(x, low, high)


# ---- functions -------------------------------------------------------------------------------------------------------

operators(
    Expm1=lambda op, x: op.Exp(x) - 1,
    Log1p=lambda op, x: op.Log(x + 1),
    Erfc=lambda op, x: 1 - op.Erf(x),
    Round=lambda op, x: op.Round(x) if _is_float(x) else x,
)


# ---- truth -----------------------------------------------------------------------------------------------------------


operators(
    NotEqual=lambda op, a, b: op.Not(op.Equal(a, b)),
    IsFinite=lambda op, x: op.Not(op.Or(op.IsNaN(x), op.IsInf(x))),
)


@operators.define("Select")
def select(op, condition, x, y, *, node):
    """A vector chooses among rows."""
    if node.rank(0) == 1 and node.rank(1) > 1:
        condition = op.Unsqueeze(condition, list(range(1, node.rank(1))))
    return op.Where(condition, x, y)


# ---- types and names -------------------------------------------------------------------------------------------------


operators(
    Cast=lambda op, x, *, DstT: cast(op, x, dtype_of(DstT)),
    Identity=lambda op, x: x,
    IdentityN=lambda op, *xs: xs,
    Snapshot=lambda op, x: x,
    PreventGradient=lambda op, x: x,
    CheckNumerics=lambda op, x: x,
    EnsureShape=lambda op, x: x,
)


@operators.define("StopGradient")
def stop_gradient(op, x, *, node):
    """ONNX has no such thing. It may go where the derivative that it stops is 0 anyway."""
    source = _source(node.operation.inputs[0])
    readers = list(_readers(node.operation.outputs[0]))
    if not _is_float(x):
        return x
    if source.type == "Mean" and all(_is_deviation(reader, source.inputs[0]) for reader in readers):
        return x  # the sum of all deviations from a mean is 0
    if source.type == "Max" and sorted(reader.type for reader in readers) in (["AddV2", "Sub"], ["Sub"]):
        return x  # of log(sum(exp(x - m))) + m, whatever m is
    raise Refused("ONNX has nothing that stops a gradient")


def _source(tensor):
    """The operation behind a tensor, and behind a choice of numbers that are finite."""
    operation = tensor.op
    while operation.type in ("SelectV2", "Identity"):
        operation = operation.inputs[operation.type == "SelectV2"].op
    return operation


def _readers(tensor):
    """The operations that read a tensor, in this shape or in another."""
    for reader in tensor.consumers():
        if reader.type == "Reshape":
            yield from _readers(reader.outputs[0])
        else:
            yield reader


def _is_deviation(reader, x):
    return reader.type == "SquaredDifference" and reader.inputs[0] is x


@operators.define("Const")
def constant(op, *, value, dtype):
    if dtype == tf.string:
        raise Refused("it is text")
    return op.constant(tf.make_ndarray(value))


operators(
    ZerosLike=lambda op, x: op.filled_like(x.value, 0),
    OnesLike=lambda op, x: op.filled_like(x.value, 1),
)


@operators.define("Xlogy")
def x_log_y(op, x, y):
    zero = op.Equal(x, 0)
    return op.Where(zero, 0, x * op.Log(op.Where(zero, 1, y)))


@operators.define("L2Loss")
def half_of_squares(op, x):
    return op.ReduceSumSquare(x, keepdims=0) * 0.5
