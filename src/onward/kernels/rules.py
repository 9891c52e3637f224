"""The derivatives of kernels, which are kernels, too; and kernels for derivatives of operators that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from onward.kernels.channels_last import DOMAIN
from onward.rules import NoGradient, Rewrite, Rule
from onward.rules.registry import lookup, make_rule
from onward.standard import domain_of

_RULES: dict[tuple[str, str], Rule] = {}


def find_rule(node: ir.Node) -> Rule | Rewrite | NoGradient | None:
    """How a node is differentiated where kernels are used."""
    rule = _RULES.get((domain_of(node), node.op_type))
    floats = all(value is None or value.dtype == ir.DataType.FLOAT for value in node.outputs)
    return rule if rule is not None and floats else lookup(node)


def _native(name: str, domain: str = DOMAIN, **settings: Any) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        _RULES[domain, name] = make_rule((domain, name), function, **settings)
        return function

    return register


@_native("Conv")
def conv(op, dy, x, w, b, *, kernel_shape, strides, dilations, pads, group):
    """As the plain rule has it, without copies of windows."""
    window = {"kernel_shape": kernel_shape, "strides": strides, "dilations": dilations, "pads": pads, "group": group}
    dx = op.node(DOMAIN, "ConvInputGradient", dy, w, op.Shape(x), **window)
    dw = op.node(DOMAIN, "ConvWeightGradient", x, dy, **window)
    return dx, dw, op.ReduceSum(dy, [0, 1, 2], keepdims=0)


@_native("BatchNormalization")
def batch_normalization(op, dys, x, scale, bias, *, ys, epsilon):
    """Y = N scale + bias with the statistics of the batch, which may be asked for themselves."""
    dy, dmean, dvariance = dys
    _, mean, variance = ys
    dx, dscale, dbias = None, None, None
    if dy is not None:
        dx, dscale, dbias = op.node(
            DOMAIN, "BatchNormalizationGradient", dy, x, scale, mean, variance, epsilon=epsilon, outputs=3
        )
    if dmean is not None or dvariance is not None:
        count = op.CastLike(op.ReduceProd(op.Shape(x, end=3), keepdims=0), x)
        direct = [] if dmean is None else [dmean / count]
        direct += [] if dvariance is None else [(x - mean) * (dvariance * 2 / count)]
        for part in direct:
            dx = part + op.filled_like(x.value, 0) if dx is None else dx + part
    return dx, dscale, dbias


@_native("MaxPool")
def max_pool(op, dy, x, *, kernel_shape, strides, dilations, pads):
    """To the first of the largest of each window."""
    window = {"kernel_shape": kernel_shape, "strides": strides, "dilations": dilations, "pads": pads}
    return op.node(DOMAIN, "MaxPoolGradient", dy, x, **window)


@_native("Relu", domain="")
def relu(op, dy, x, *, y):
    return op.node(DOMAIN, "ReluGradient", dy, y)


@_native("Attention", inputs=(0, 1, 2))
def attention(op, dys, q, k, v, mask, *, ys, scale, causal, guarded, length_first):
    """Scores are computed again: of them, only the largest and the sum of exponentials of each query were kept."""
    settings = {"scale": scale, "causal": causal, "guarded": guarded, "length_first": length_first}
    return op.node(DOMAIN, "AttentionGradient", dys[0], q, k, v, *ys, mask, outputs=3, **settings)
