"""Derivatives of kernels, which are kernels too, and kernels for derivatives of standard operators."""

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
"""Predicate: True if a kernel supports a node."""

_RULES: dict[tuple[str, str], tuple[Rule, When]] = {}


def find_rule(node: ir.Node) -> Rule | Rewrite | NoGradient | None:
    """Return the rule of a node with kernels in use."""
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
    """Return the gradients of the plain rule, without copies of windows."""
    dx = op.node(DOMAIN, "ConvInputGradient", dy, w, op.Shape(x), **_settings(node))
    dw = op.node(DOMAIN, "ConvWeightGradient", x, dy, **_settings(node))
    return dx, dw, op.ReduceSum(dy, [0, 1, 2], keepdims=0)


@_native("ConvTranspose")
def conv_transpose(op, dy, x, w, b, *, kernel_shape, strides, dilations, pads, group):
    """Return the gradients by Conv, with image and gradient exchanged."""
    window = {"kernel_shape": kernel_shape, "strides": strides, "dilations": dilations, "pads": pads, "group": group}
    dw = op.node(DOMAIN, "ConvWeightGradient", dy, x, **window)
    return op.node(DOMAIN, "Conv", dy, w, **window), dw, op.ReduceSum(dy, [0, 1, 2], keepdims=0)


@_native("BatchNormalization")
def batch_normalization(op, dys, x, scale, bias, *, ys, epsilon, activation=0):
    """Differentiate Y = f(N scale + bias) with batch statistics, which may have gradients too."""
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
        by_statistics = [] if dmean is None else [dmean / count]
        by_statistics += [] if dvariance is None else [(x - mean) * (dvariance * 2 / count)]
        for summand in by_statistics:
            dx = summand + op.filled_like(x.value, 0) if dx is None else dx + summand
    return dx, dscale, dbias


@_native("MaxPool")
def max_pool(op, dy, x, *, node):
    """Return the gradient at the first maximum of each window."""
    return op.node(DOMAIN, "MaxPoolGradient", dy, x, **_settings(node))


@_native("AveragePool")
def average_pool(op, dy, x, *, node):
    return op.node(DOMAIN, "AveragePoolGradient", dy, op.Shape(x), **_settings(node))


@_native("Resize", inputs=(0,))
def resize(op, dy, x, lines, parts_of_lines, columns, parts_of_columns):
    """Return the gradient of each pixel: the weighted gradients of the pixels computed from it."""
    return op.node(DOMAIN, "ResizeGradient", dy, lines, parts_of_lines, columns, parts_of_columns, op.Shape(x))


@_native("Relu", domain="")
def relu(op, dy, x, *, y):
    return op.node(DOMAIN, "ReluGradient", dy, y)


@_native("Attention", inputs=(0, 1, 2))
def attention(op, dys, q, k, v, mask, *, ys, node):
    """Return the gradients with recomputed scores; the forward pass saves their maxima and sums."""
    return op.node(DOMAIN, "AttentionGradient", dys[0], q, k, v, *ys, mask, outputs=3, **_settings(node))


@_native("CrossEntropy", inputs=(0,))
def cross_entropy(op, dys, scores, labels, weights, *, ys, node):
    """Return the weight of each row in the loss times (softmax - 1 at the label)."""
    return op.node(DOMAIN, "CrossEntropyGradient", dys[0], ys[1], scores, labels, weights, **_settings(node))


# ---- recurrent layers ------------------------------------------------------------------------------------------------


def _back_through_steps(op, kernel, dys, ys, items, r, states, lengths, backwards, more=()):
    """Return gradients of items and first states, the states before each step, and `more`."""
    count = len(states)
    all_states, saved, dlast = ys[:count], ys[2 * count :], dys[count : 2 * count]
    results = op.node(
        DOMAIN,
        kernel,
        *(r, *states, *all_states, *saved, dys[0], *dlast, lengths),
        backwards=backwards,
        outputs=2 + count + len(more),
    )
    for value, like in zip(results, (items, *states, all_states[0], *more), strict=True):
        value.like(like.value)
    return results[0], results[1 : 1 + count], *results[1 + count :]


def _weight_gradient(op, dproducts, states):
    """Return the gradient of weights that multiply all states."""
    return op.Gemm(_as_rows(op, dproducts), _as_rows(op, states), transA=1)


def _as_rows(op, x):
    """Return all steps of all sequences as rows of a matrix."""
    steps, batch, width = x.value.shape
    rows = op.Reshape(x, [-1, width])
    is_static = isinstance(steps, int) and isinstance(batch, int)
    rows.value.shape = ir.Shape([steps * batch if is_static else op.names.fresh("rows"), width])
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
    """Differentiate with a separate gradient of the matmuls with states, which are reset later."""
    ditems, dstates, before, dproducts = _back_through_steps(
        op, "LinearGRUGradient", dys, ys, items, r, [state], lengths, backwards, more=[items]
    )
    units = state.value.shape[-1]
    db = None if b is None else op.Slice(op.ReduceSum(dproducts, [0, 1], keepdims=0), [2 * units], [3 * units], [0])
    return ditems, _weight_gradient(op, dproducts, before), *dstates, db


@_native("GRU", inputs=(0, 1, 2))
def gru(op, dys, items, r, state, lengths, *, ys, backwards):
    """Differentiate; the candidate reads reset states, the gates plain ones."""
    ditems, dstates, before, reset = _back_through_steps(
        op, "GRUGradient", dys, ys, items, r, [state], lengths, backwards, more=[ys[0]]
    )
    units = state.value.shape[-1]
    dgates, dcandidate = op.Split(ditems, [2 * units, units], axis=-1, outputs=2)
    dr = op.Concat(_weight_gradient(op, dgates, before), _weight_gradient(op, dcandidate, reset), axis=0)
    return ditems, dr, *dstates


# ---- activations -----------------------------------------------------------------------------------------------------


def _activation(name: str, *, by_output: bool = False, domain: str = "") -> None:
    """Register dX = dY times the slope, computed from the input or the output."""

    def rule(op, dy, x, *, y, alpha):
        return op.node(DOMAIN, f"{name}Gradient", dy, y if by_output else x, alpha=alpha)

    _native(name, domain)(rule)


for _name in ("HardSigmoid", "HardSwish", "LeakyRelu", "Sigmoid", "Swish", "Tanh"):
    _activation(_name, by_output=_name in ("HardSigmoid", "Sigmoid", "Tanh"))
for _name in ("Gelu", "GeluOfTanh", "Swish"):
    _activation(_name, domain=DOMAIN)


@_native("Gelu", domain="")
def gelu(op, dy, x, *, approximate):
    return op.node(DOMAIN, "GeluOfTanhGradient" if approximate == "tanh" else "GeluGradient", dy, x)


# ---- rows ------------------------------------------------------------------------------------------------------------


def _has_weights_of_rows(node: ir.Node) -> bool:
    """True if scale and bias have an element per element of a row, and statistics are unused."""
    shapes = [dims(value) for value in node.inputs if value is not None]
    rank, axis = len(shapes[0] or ()), node.attributes.get_int("axis", -1)
    is_known = None not in shapes and -rank <= axis < rank and len(node.outputs) == 1
    return is_known and all(shape == shapes[0][axis:] for shape in shapes[1:] if shapes[0] is not None)


@_native("LayerNormalization", domain="", when=_has_weights_of_rows)
def layer_normalization(op, dy, x, scale, bias, *, node, axis):
    """Return the gradients from the statistics of the forward pass."""
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
    """Return the gradient of a lookup of rows, summed in the order of the indices."""
    rank, single = x.value.shape and x.value.shape.rank(), constant_ints(indices.value)
    if rank is None or axis % rank or (single is not None and len(single) == 1):
        return indexing.gather(op, dy, x, indices, axis=axis)
    positions = indices if indices.dtype is ir.DataType.INT64 else op.Cast(indices, to=ir.DataType.INT64)
    return op.node(DOMAIN, "LookupGradient", positions, dy, op.Shape(x)).like(x.value)
