"""Arithmetic, comparison, activations and losses of each element or row, and types."""

from __future__ import annotations

import tensorflow as tf

from onward.constants import is_relu6
from onward.engines.framework import Operators
from onward.frameworks.formulas.elementwise import (
    COMMON,
    erf_inv,
    floor_divide,
    floor_mod,
    multiply,
    product_or_zero,
    relu6,
)
from onward.frameworks.formulas.graph_building import cast, same_operator
from onward.frameworks.tensorflow.graph import Refused, as_int64, dtype_of
from onward.recipe.assembly import stop_gradient

operators = Operators()


def _is_float(x):
    return x.dtype.is_floating_point()


_SAME = ("Abs", "Equal", "IsInf", "Neg", "Reciprocal", "Elu", "LogSoftmax", "Relu", "Selu", "Sigmoid", "Softmax",
         "Softplus", "Softsign")  # fmt: skip
"""Operations that the standard has under the same names, and below those that it has under others."""
_OTHERWISE_NAMED = {
    "Add": "Add", "AddV2": "Add", "Div": "Div", "RealDiv": "Div", "TruncateDiv": "Div", "Inv": "Reciprocal",
    "Greater": "Greater", "GreaterEqual": "GreaterOrEqual", "IsNan": "IsNaN", "Less": "Less",
    "LessEqual": "LessOrEqual", "LogicalAnd": "And", "LogicalNot": "Not", "LogicalOr": "Or", "Rint": "Round",
}  # fmt: skip
operators(**COMMON, **{name: same_operator(name) for name in _SAME})
operators(**{name: same_operator(operator) for name, operator in _OTHERWISE_NAMED.items()})


# ---- arithmetic ------------------------------------------------------------------------------------------------------


operators(
    AddN=lambda op, *xs: op.Sum(*xs) if len(xs) > 1 else xs[0],
    FloorDiv=floor_divide,
    FloorMod=floor_mod,
    TruncateMod=lambda op, a, b: op.Mod(a, b, fmod=1),
    Mul=multiply,
    SquaredDifference=lambda op, a, b: (a - b) * (a - b),
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
    if is_relu6(low.value, high.value):  # whose slope at the bounds is 0, and here it is 1
        return op.Clip(op.Clip(x, low), None, high)
    return op.Clip(x, low, high)


# ---- functions -------------------------------------------------------------------------------------------------------

operators(
    Erfinv=erf_inv,
    Xdivy=lambda op, x, y: product_or_zero(op, x, "divide", y),
    Xlog1py=lambda op, x, y: product_or_zero(op, x, "log1p", y),
    Xlogy=lambda op, x, y: product_or_zero(op, x, "log", y),
    MulNoNan=lambda op, x, y: op.Where(op.Equal(y, 0), 0, op.Where(op.Equal(y, 0), 0, x) * y),
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
    Snapshot=lambda op, x: x,
    CheckNumerics=lambda op, x: x,
    EnsureShape=lambda op, x: x,
)


@operators.define("IdentityN")
def identities(op, *xs, node):
    """Where a function ends that was given its derivative, TensorFlow names this operation as its gradient."""
    node.translator.own_gradients |= "_gradient_op_type" in node.operation.node_def.attr
    return xs


@operators.define("StopGradient")
def stop(op, x):
    return op.call(stop_gradient, x).like(x.value) if _is_float(x) else x


@operators.define("PreventGradient")
def prevent_gradient(op, x, *, message):
    """TensorFlow raises where a gradient reaches it, so that a model with it in its loss cannot be trained."""
    raise Refused(f"a gradient through it is an error: {message}")


@operators.define("Const")
def constant(op, *, value, dtype):
    if dtype == tf.string:
        raise Refused("it is text")
    return op.constant(tf.make_ndarray(value))


operators(
    ZerosLike=lambda op, x: op.filled_like(x.value, 0),
    OnesLike=lambda op, x: op.filled_like(x.value, 1),
)


@operators.define("L2Loss")
def half_of_squares(op, x):
    return op.ReduceSumSquare(x, keepdims=0) * 0.5


# ---- activation ------------------------------------------------------------------------------------------------------

operators(
    Relu6=relu6,
    LeakyRelu=lambda op, x, *, alpha: op.LeakyRelu(x, alpha=alpha),
)


# ---- loss ------------------------------------------------------------------------------------------------------------


@operators.define("SparseSoftmaxCrossEntropyWithLogits")
def sparse_cross_entropy(op, logits, labels):
    return op.SoftmaxCrossEntropyLoss(logits, as_int64(op, labels), reduction="none")


@operators.define("SoftmaxCrossEntropyWithLogits")
def cross_entropy(op, logits, targets):
    return -op.ReduceSum(targets * op.LogSoftmax(logits, axis=-1), [-1], keepdims=0)
