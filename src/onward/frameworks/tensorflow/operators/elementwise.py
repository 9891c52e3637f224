"""Arithmetic, comparison, activations, elementwise losses and types."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import tensorflow as tf

from onward.constants import is_relu6
from onward.engines.framework import Operators
from onward.frameworks.formulas.elementwise import (
    COMMON,
    erf_inv,
    floor_divide,
    floor_mod,
    is_negative,
    multiply,
    product_or_zero,
    relu6,
)
from onward.frameworks.formulas.graph_building import cast, same_operator
from onward.frameworks.tensorflow.graph import RefusedOperation, as_int64, dtype_of
from onward.recipe.step_builder import stop_gradient

operators = Operators()


def _is_float(x):
    return x.dtype.is_floating_point()


# Operations that have the same name in ONNX.
_SAME = ("Abs", "Equal", "IsInf", "Neg", "Reciprocal", "Elu", "LogSoftmax", "Relu", "Selu", "Sigmoid", "Softmax",
         "Softplus", "Softsign", "BitwiseAnd")  # fmt: skip
_OTHERWISE_NAMED = {
    "Add": "Add", "AddV2": "Add", "Div": "Div", "RealDiv": "Div", "TruncateDiv": "Div", "Inv": "Reciprocal",
    "Greater": "Greater", "GreaterEqual": "GreaterOrEqual", "IsNan": "IsNaN", "Less": "Less",
    "LessEqual": "LessOrEqual", "LogicalAnd": "And", "LogicalNot": "Not", "LogicalOr": "Or", "Rint": "Round",
}  # fmt: skip
operators(
    **COMMON,
    **{name: same_operator(name) for name in _SAME},
    **{name: same_operator(operator) for name, operator in _OTHERWISE_NAMED.items()},
    AddN=lambda op, *xs: op.Sum(*xs) if len(xs) > 1 else xs[0],
    FloorDiv=floor_divide,
    FloorMod=floor_mod,
    TruncateMod=lambda op, a, b: op.Mod(a, b, fmod=1),
    Mul=multiply,
    SquaredDifference=lambda op, a, b: (a - b) * (a - b),
)


@operators.define("DivNoNan")
def div_no_nan(op, a, b):
    """Return 0 where the divisor is 0, with a derivative of 0."""
    zero = op.Equal(b, 0)
    return op.Where(zero, 0, a / op.Where(zero, 1, b))


def _choose(op, second, a, b):
    """Return `b` where `second` or if it is NaN, else `a`, which gets all the gradient of a tie."""
    return op.Where(op.Or(second, op.IsNaN(b)), b, a)


@operators.define("ClipByValue")
def clip_by_value(op, x, low, high, *, node):
    if node.rank(1) or node.rank(2):
        raise RefusedOperation("its bounds are not scalars, as those of Clip")
    if is_relu6(low.value, high.value):  # a Clip to 0 and 6 has slope 0 at the bounds, TensorFlow 1
        return op.Clip(op.Clip(x, low), None, high)
    return op.Clip(x, low, high)


operators(
    Maximum=lambda op, a, b: _choose(op, a < b, a, b) if _is_float(a) else op.Max(a, b),
    Minimum=lambda op, a, b: _choose(op, a > b, a, b) if _is_float(a) else op.Min(a, b),
    Erfinv=erf_inv,
    Xdivy=lambda op, x, y: product_or_zero(op, x, "divide", y),
    Xlog1py=lambda op, x, y: product_or_zero(op, x, "log1p", y),
    Xlogy=lambda op, x, y: product_or_zero(op, x, "log", y),
    MulNoNan=lambda op, x, y: op.Where(op.Equal(y, 0), 0, op.Where(op.Equal(y, 0), 0, x) * y),
    Round=lambda op, x: op.Round(x) if _is_float(x) else x,
    NotEqual=lambda op, a, b: op.Not(op.Equal(a, b)),
    IsFinite=lambda op, x: op.Not(op.Or(op.IsNaN(x), op.IsInf(x))),
    Cast=lambda op, x, *, DstT: cast(op, x, dtype_of(DstT)),
    Identity=lambda op, x: x,
    Snapshot=lambda op, x: x,
    CheckNumerics=lambda op, x: x,
    EnsureShape=lambda op, x: x,
    StopGradient=lambda op, x: op.call(stop_gradient, x).like(x.value) if _is_float(x) else x,
    ZerosLike=lambda op, x: op.filled_like(x.value, 0),
    OnesLike=lambda op, x: op.filled_like(x.value, 1),
    L2Loss=lambda op, x: op.ReduceSumSquare(x, keepdims=0) * 0.5,
    Relu6=relu6,
    LeakyRelu=lambda op, x, *, alpha: op.LeakyRelu(x, alpha=alpha),
    SparseSoftmaxCrossEntropyWithLogits=lambda op, logits, labels: op.SoftmaxCrossEntropyLoss(
        logits, as_int64(op, labels), reduction="none"
    ),
    SoftmaxCrossEntropyWithLogits=lambda op, logits, targets: (
        -op.ReduceSum(targets * op.LogSoftmax(logits, axis=-1), [-1], keepdims=0)
    ),
)


@operators.define("Select")
def select(op, condition, x, y, *, node):
    """Select elements; a vector of conditions selects rows."""
    if node.rank(0) == 1 and node.rank(1) > 1:
        condition = op.Unsqueeze(condition, list(range(1, node.rank(1))))
    return op.Where(condition, x, y)


@operators.define("IdentityN")
def identities(op, *xs, node):
    """Return the inputs. `tf.custom_gradient` marks the operation with its gradient."""
    node.translator.own_gradients |= "_gradient_op_type" in node.operation.node_def.attr
    return xs


@operators.define("Bitcast")
def sign_bit(op, x, *, node):
    """Return the sign bit, if nothing else of the integer is read: `keras.ops.argmin` tells -0 from 0."""
    lowest = np.iinfo(np.int32).min
    readers = node.operation.outputs[0].consumers()
    masks = [tf.get_static_value(y) for reader in readers for y in reader.inputs if y.op is not node.operation]
    is_sign = x.dtype is ir.DataType.FLOAT and all(reader.type == "BitwiseAnd" for reader in readers)
    if not is_sign or any(mask is None or np.any(mask != lowest) for mask in masks):
        raise RefusedOperation("it reads more bits of a number than its sign")
    return op.Where(is_negative(op, x), np.int32(lowest), np.int32(0))


@operators.define("PreventGradient")
def prevent_gradient(op, x, *, message):
    """Refuse the operation: TensorFlow raises an error where a gradient reaches it."""
    raise RefusedOperation(f"a gradient through it is an error: {message}")


@operators.define("Const")
def constant(op, *, value, dtype):
    if dtype == tf.string:
        raise RefusedOperation("it is a string")
    return op.constant(tf.make_ndarray(value))
