"""The derivatives of kernels, which are kernels, too; and kernels for derivatives of operators that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onward.constants import constant_ints
from onward.kernels.channels_last import TO_FIRST
from onward.kernels.library import DOMAIN
from onward.rules import NoGradient, Rewrite, Rule, indexing
from onward.rules.common import further_output
from onward.rules.normalization import without_masked_rows
from onward.rules.registry import lookup, make_rule
from onward.shapes import dims
from onward.standard import domain_of

When = Callable[[ir.Node], bool]
"""Whether a kernel can do what a node does."""

_RULES: dict[tuple[str, str], tuple[Rule, When]] = {}


def find_rule(node: ir.Node) -> Rule | Rewrite | NoGradient | None:
    """How a node is differentiated where kernels are used."""
    rule, when = _RULES.get((domain_of(node), node.op_type), (None, None))
    floats = all(value is None or value.dtype == ir.DataType.FLOAT for value in node.outputs)
    return rule if when is not None and floats and when(node) else lookup(node)


def _native(name: str, domain: str = DOMAIN, when: When = lambda node: True, **settings: Any) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        _RULES[domain, name] = make_rule((domain, name), function, **settings), when
        return function

    return register


def _settings(node: ir.Node) -> dict[str, Any]:
    """Return the attributes of a kernel, all of which are given: those of its derivative are the same."""
    return {name: attribute.value for name, attribute in node.attributes.items()}


@_native("ChannelsLast")
def channels_last(op, dy, x):
    return op.Transpose(dy, perm=TO_FIRST)


@_native("Conv")
def conv(op, dy, x, w, b, *, node):
    """As the plain rule has it, without copies of windows."""
    dx = op.node(DOMAIN, "ConvInputGradient", dy, w, op.Shape(x), **_settings(node))
    dw = op.node(DOMAIN, "ConvWeightGradient", x, dy, **_settings(node))
    return dx, dw, op.ReduceSum(dy, [0, 1, 2], keepdims=0)


@_native("ConvTranspose")
def conv_transpose(op, dy, x, w, b, *, kernel_shape, strides, dilations, pads, group):
    """Conv with the roles of image and gradient exchanged."""
    window = {"kernel_shape": kernel_shape, "strides": strides, "dilations": dilations, "pads": pads, "group": group}
    dw = op.node(DOMAIN, "ConvWeightGradient", dy, x, **window)
    return op.node(DOMAIN, "Conv", dy, w, **window), dw, op.ReduceSum(dy, [0, 1, 2], keepdims=0)


@_native("BatchNormalization")
def batch_normalization(op, dys, x, scale, bias, *, ys, epsilon, activation=0):
    """Y = f(N scale + bias) with the statistics of the batch, which may be asked for themselves."""
    dy, dmean, dvariance = dys
    _, mean, variance = ys
    dx, dscale, dbias = None, None, None
    if dy is not None:
        dx, dscale, dbias = op.node(
            DOMAIN,
            "BatchNormalizationGradient",
            *(dy, x, scale, bias, mean, variance),
            epsilon=epsilon,
            activation=activation,
            outputs=3,
        )
    if dmean is not None or dvariance is not None:
        count = op.CastLike(op.ReduceProd(op.Shape(x, end=3), keepdims=0), x)
        direct = [] if dmean is None else [dmean / count]
        direct += [] if dvariance is None else [(x - mean) * (dvariance * 2 / count)]
        for part in direct:
            dx = part + op.filled_like(x.value, 0) if dx is None else dx + part
    return dx, dscale, dbias


@_native("MaxPool")
def max_pool(op, dy, x, *, node):
    """To the first of the largest of each window."""
    return op.node(DOMAIN, "MaxPoolGradient", dy, x, **_settings(node))


@_native("AveragePool")
def average_pool(op, dy, x, *, node):
    return op.node(DOMAIN, "AveragePoolGradient", dy, op.Shape(x), **_settings(node))


@_native("Resize", inputs=(0,))
def resize(op, dy, x, lines, parts_of_lines, columns, parts_of_columns):
    """Each gets its parts back."""
    return op.node(DOMAIN, "ResizeGradient", dy, lines, parts_of_lines, columns, parts_of_columns, op.Shape(x))


@_native("Relu", domain="")
def relu(op, dy, x, *, y):
    return op.node(DOMAIN, "ReluGradient", dy, y)


@_native("Attention", inputs=(0, 1, 2))
def attention(op, dys, q, k, v, mask, *, ys, node):
    """Scores are computed again: of them, only the largest and the sum of exponentials of each query were kept."""
    return op.node(DOMAIN, "AttentionGradient", dys[0], q, k, v, *ys, mask, outputs=3, **_settings(node))


@_native("CrossEntropy", inputs=(0,))
def cross_entropy(op, dys, scores, labels, weights, *, ys, node):
    """The share of a row in the loss, times (softmax - 1 at the label)."""
    return op.node(DOMAIN, "CrossEntropyGradient", dys[0], ys[1], scores, labels, weights, **_settings(node))


# ---- recurrent layers ------------------------------------------------------------------------------------------------


def _back_through_steps(op, kernel, dys, ys, items, r, states, lengths, backwards, more=()):
    """Gradients of items and initial states; then the hidden states before each step, and `more` that a kernel has."""
    count = len(states)
    every, kept, dlast = ys[:count], ys[2 * count :], dys[count : 2 * count]
    found = op.node(
        DOMAIN,
        kernel,
        *(r, *states, *every, *kept, dys[0], *dlast, lengths),
        backwards=backwards,
        outputs=2 + count + len(more),
    )
    for value, like in zip(found, (items, *states, every[0], *more), strict=True):
        value.like(like.value)
    return found[0], found[1 : 1 + count], *found[1 + count :]


def _weight_gradient(op, dproducts, states):
    """That of weights that all states were multiplied with."""
    return op.Gemm(_as_rows(op, dproducts), _as_rows(op, states), transA=1)


def _as_rows(op, x):
    """All steps of all sequences, one below the other."""
    steps, batch, width = x.value.shape
    rows = op.Reshape(x, [-1, width])
    known = isinstance(steps, int) and isinstance(batch, int)
    rows.value.shape = ir.Shape([steps * batch if known else op.names.fresh("rows"), width])
    return rows


@_native("RNN", inputs=(0, 1, 2))
def rnn(op, dys, items, r, state, lengths, *, ys, backwards):
    ditems, dstates, before = _back_through_steps(op, "RNNGradient", dys, ys, items, r, [state], lengths, backwards)
    return ditems, _weight_gradient(op, ditems, before), *dstates


@_native("LSTM", inputs=(0, 1, 2, 3))
def lstm(op, dys, items, r, state, memory, lengths, *, ys, backwards):
    ditems, dstates, before = _back_through_steps(
        op, "LSTMGradient", dys, ys, items, r, [state, memory], lengths, backwards
    )
    return ditems, _weight_gradient(op, ditems, before), *dstates


@_native("LinearGRU", inputs=(0, 1, 2, 3))
def linear_gru(op, dys, items, r, state, b, lengths, *, ys, backwards):
    """Products with states have a gradient of their own, as they are reset before they are added to the items."""
    ditems, dstates, before, dproducts = _back_through_steps(
        op, "LinearGRUGradient", dys, ys, items, r, [state], lengths, backwards, more=[items]
    )
    units = state.value.shape[-1]
    db = None if b is None else op.Slice(op.ReduceSum(dproducts, [0, 1], keepdims=0), [2 * units], [3 * units], [0])
    return ditems, _weight_gradient(op, dproducts, before), *dstates, db


@_native("GRU", inputs=(0, 1, 2))
def gru(op, dys, items, r, state, lengths, *, ys, backwards):
    """The candidate is made of states that were reset, gates of those that were not."""
    ditems, dstates, before, reset = _back_through_steps(
        op, "GRUGradient", dys, ys, items, r, [state], lengths, backwards, more=[ys[0]]
    )
    units = state.value.shape[-1]
    dgates, dcandidate = op.Split(ditems, [2 * units, units], axis=-1, outputs=2)
    dr = op.Concat(_weight_gradient(op, dgates, before), _weight_gradient(op, dcandidate, reset), axis=0)
    return ditems, dr, *dstates


# ---- functions of each element ---------------------------------------------------------------------------------------


def _activation(name: str, kernel: str, *, by_output: bool = False, domain: str = "", **settings: Any) -> None:
    """dX = dY times the slope, which is computed from the input or, if that says more, from the output."""

    def rule(op, dy, x, *, y, alpha):
        return op.node(DOMAIN, f"{kernel}Gradient", dy, y if by_output else x, alpha=alpha)

    _native(name, domain, **settings)(rule)


_activation("HardSigmoid", "HardSigmoid", by_output=True)
_activation("HardSwish", "HardSwish")
_activation("LeakyRelu", "LeakyRelu")
_activation("Sigmoid", "Sigmoid", by_output=True)
_activation("Swish", "Swish")
_activation("Tanh", "Tanh", by_output=True)
for _name in ("Gelu", "GeluOfTanh", "Swish"):
    _activation(_name, _name, domain=DOMAIN)


@_native("Gelu", domain="")
def gelu(op, dy, x, *, approximate):
    return op.node(DOMAIN, "GeluOfTanhGradient" if approximate == "tanh" else "GeluGradient", dy, x)


# ---- rows ------------------------------------------------------------------------------------------------------------


def _has_weights_of_rows(node: ir.Node) -> bool:
    """Whether scale and bias have a number for each element of a row, and nobody asks for statistics."""
    shapes = [dims(value) for value in node.inputs if value is not None]
    rank, axis = len(shapes[0] or ()), node.attributes.get_int("axis", -1)
    is_known = None not in shapes and -rank <= axis < rank and len(node.outputs) == 1
    return is_known and all(shape == shapes[0][axis:] for shape in shapes[1:] if shapes[0] is not None)


@_native("LayerNormalization", domain="", when=_has_weights_of_rows)
def layer_normalization(op, dy, x, scale, bias, *, node, axis):
    """As the plain rule has it, with the statistics of the forward pass."""
    mean, inverse = (further_output(op, node, i, ir.DataType.FLOAT, None) for i in (1, 2))
    return op.node(DOMAIN, "LayerNormalizationGradient", dy, x, scale, mean, inverse, axis=axis, outputs=3)


@_native("RMSNormalization", domain="", when=_has_weights_of_rows)
def rms_normalization(op, dy, x, scale, *, axis, epsilon):
    return op.node(DOMAIN, "RMSNormalizationGradient", dy, x, scale, axis=axis, epsilon=epsilon, outputs=2)


def _is_over_last_axis(node: ir.Node) -> bool:
    shape = node.outputs[0].shape
    return shape is not None and shape.rank() > 0 and node.attributes.get_int("axis", -1) in (-1, shape.rank() - 1)


@_native("Softmax", domain="", when=_is_over_last_axis)
def softmax(op, dy, x, *, y):
    return op.node(DOMAIN, "SoftmaxGradient", dy, without_masked_rows(op, y))


@_native("LogSoftmax", domain="", when=_is_over_last_axis)
def log_softmax(op, dy, x, *, y):
    return op.node(DOMAIN, "LogSoftmaxGradient", dy, y)


@_native("Gather", domain="")
def gather(op, dy, x, indices, *, axis):
    """Rows of a table: they are added up in their order."""
    rank, single = x.value.shape and x.value.shape.rank(), constant_ints(indices.value)
    if rank is None or axis % rank or (single is not None and len(single) == 1):
        return indexing.gather(op, dy, x, indices, axis=axis)
    places = indices if indices.dtype is ir.DataType.INT64 else op.Cast(indices, to=ir.DataType.INT64)
    return op.node(DOMAIN, "LookupGradient", places, dy, op.Shape(x)).like(x.value)
