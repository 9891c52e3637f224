"""Operators for which ONNX Runtime has no float64, written in operators for which it has.

Only for computing values: slower than the operators themselves, and never part of a gradient that anyone gets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onward.build import Builder, Expr
from onward.differentiate.expand import replace_node
from onward.errors import UnsupportedError
from onward.model import Model
from onward.rules.registry import Rewrite, make_rewrite
from onward.standard import is_standard

TABLE: dict[str, Rewrite] = {}
"""Standard operator -> what stands for it."""


def with_standins(model: Model) -> Model:
    """The model with these operators replaced, in place; `UnsupportedError` where a form of one is not covered."""
    names = model.names()
    for node in list(model.graph.all_nodes()):
        if is_standard(node) and node.op_type in TABLE:
            replace_node(model, node, TABLE[node.op_type], names)
    return model


def _standin(*operators: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        TABLE.update({name: make_rewrite(("", name), function) for name in operators})
        return function

    return register


# ---- element by element ----------------------------------------------------------------------------------------------

_ELEMENTWISE: dict[str, Callable[..., Expr]] = {
    "Acosh": lambda op, x: op.Log(x + op.Sqrt(x * x - 1.0)),
    "Asinh": lambda op, x: op.Log(x + op.Sqrt(x * x + 1.0)),
    "Atanh": lambda op, x: 0.5 * op.Log((1.0 + x) / (1.0 - x)),
    "Celu": lambda op, x, *, alpha: op.Where(x > 0.0, x, alpha * (op.Exp(op.Min(x, 0.0) / alpha) - 1.0)),
    "Cosh": lambda op, x: 0.5 * (op.Exp(x) + op.Exp(-x)),
    "Elu": lambda op, x, *, alpha: op.Where(x > 0.0, x, alpha * (op.Exp(op.Min(x, 0.0)) - 1.0)),
    "Erf": lambda op, x: _erf(op, x),
    "HardSigmoid": lambda op, x, *, alpha, beta: op.Clip(alpha * x + beta, 0.0, 1.0),
    "HardSwish": lambda op, x: x * op.Clip(x / 6.0 + 0.5, 0.0, 1.0),
    "Mish": lambda op, x: x * op.Tanh(_softplus(op, x)),
    "Selu": lambda op, x, *, alpha, gamma: gamma * op.Where(x > 0.0, x, alpha * (op.Exp(op.Min(x, 0.0)) - 1.0)),
    "Sinh": lambda op, x: 0.5 * (op.Exp(x) - op.Exp(-x)),
    "Softplus": lambda op, x: _softplus(op, x),
    "Softsign": lambda op, x: x / (1.0 + op.Abs(x)),
    "Tan": lambda op, x: op.Sin(x) / op.Cos(x),
    "ThresholdedRelu": lambda op, x, *, alpha: op.Where(x > alpha, x, 0.0),
}
for _name, _function in _ELEMENTWISE.items():
    _standin(_name)(_function)


@_standin("Gelu")
def _gelu(op: Builder, x: Expr, *, approximate: str) -> Expr:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + op.Tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1.0 + _erf(op, x / math.sqrt(2)))


@_standin("Mean")
def _mean(op: Builder, *xs: Expr) -> Expr:
    return op.Sum(*xs) / float(len(xs))


def _softplus(op: Builder, x: Expr) -> Expr:
    return op.Max(x, 0.0) + op.Log(1.0 + op.Exp(-op.Abs(x)))


def _erf(op: Builder, x: Expr) -> Expr:
    """2/√π ∫ exp(-t²) from 0 to x, as a sum over 48 points: exact to 14 digits. Beyond 6 it is 1."""
    points, weights = np.polynomial.legendre.leggauss(48)
    x = op.Clip(x, -6.0, 6.0)
    t = op.Unsqueeze(x, [-1]) * (0.5 * (1 + points))
    return x * op.ReduceSum(op.Exp(-(t * t)) * weights, [-1], keepdims=0) / math.sqrt(math.pi)


# ---- windows ---------------------------------------------------------------------------------------------------------


@_standin("GlobalAveragePool")
def _global_average_pool(op: Builder, x: Expr) -> Expr:
    return op.ReduceMean(x, _spatial(x), keepdims=1)


@_standin("GlobalMaxPool")
def _global_max_pool(op: Builder, x: Expr) -> Expr:
    return op.ReduceMax(x, _spatial(x), keepdims=1)


@_standin("InstanceNormalization")
def _instance_normalization(op: Builder, x: Expr, scale: Expr, bias: Expr, *, epsilon: float) -> Expr:
    axes = _spatial(x)
    centred = x - op.ReduceMean(x, axes, keepdims=1)
    variance = op.ReduceMean(centred * centred, axes, keepdims=1)
    beside = [axis - 1 for axis in axes]
    return centred / op.Sqrt(variance + epsilon) * op.Unsqueeze(scale, beside) + op.Unsqueeze(bias, beside)


@_standin("Conv")
def _conv(
    op: Builder,
    x: Expr,
    w: Expr,
    b: Expr | None,
    *,
    group: int,
    auto_pad: str,
    dilations: Sequence[int] | None,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
) -> Expr:
    """For each place in the kernel, a product of matrices with what lies under it."""
    if w.value.shape is None or not w.value.shape.is_static() or auto_pad not in ("NOTSET", "VALID"):
        raise UnsupportedError("this form of Conv is not done in float64")
    out, inner, *kernel = w.value.shape.numpy()
    padded = _padded(op, x, pads, len(kernel))
    products, window = [], x
    for place in itertools.product(*map(range, kernel)):
        window = _window(op, padded, place, kernel, strides, dilations)
        columns = op.Reshape(window, [0, group, inner, -1])
        products.append(op.MatMul(op.Reshape(_at(op, w, place), [group, out // group, inner]), columns))
    shape = op.Concat(op.Shape(x, end=1), op.constant(np.array([out])), op.Shape(window, start=2), axis=0)
    return _with_bias(op, op.Reshape(op.Sum(*products), shape), b, len(kernel))


@_standin("ConvTranspose")
def _conv_transpose(
    op: Builder,
    x: Expr,
    w: Expr,
    b: Expr | None,
    *,
    group: int,
    auto_pad: str,
    dilations: Sequence[int] | None,
    output_padding: Sequence[int] | None,
    output_shape: Sequence[int] | None,
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
) -> Expr:
    """For each place in the kernel, a product of matrices, moved to where it goes; what lies outside is cut off."""
    if w.value.shape is None or not w.value.shape.is_static() or output_shape or auto_pad not in ("NOTSET", "VALID"):
        raise UnsupportedError("this form of ConvTranspose is not done in float64")
    channels, out, *kernel = w.value.shape.numpy()
    rank = len(kernel)
    dilations, pads, extra = dilations or [1] * rank, pads or [0] * 2 * rank, output_padding or [0] * rank
    wide = _spread(op, x, strides or [1] * rank)
    columns = op.Reshape(wide, [0, group, channels // group, -1])
    shape = op.Concat(op.Shape(x, end=1), op.constant(np.array([out * group])), op.Shape(wide, start=2), axis=0)
    moved = []
    for place in itertools.product(*map(range, kernel)):
        weight = _at(op, w, place)
        product = op.MatMul(op.Transpose(op.Reshape(weight, [group, channels // group, out]), perm=[0, 2, 1]), columns)
        before = [p * d - n for p, d, n in zip(place, dilations, pads[:rank], strict=True)]
        after = [
            (k - 1 - p) * d - n + e for k, p, d, n, e in zip(kernel, place, dilations, pads[rank:], extra, strict=True)
        ]
        moved.append(op.Pad(op.Reshape(product, shape), [0, 0, *before, 0, 0, *after]))
    return _with_bias(op, op.Sum(*moved), b, rank)


@_standin("AveragePool")
def _average_pool(
    op: Builder,
    x: Expr,
    *,
    auto_pad: str,
    ceil_mode: int,
    count_include_pad: int,
    dilations: Sequence[int] | None,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None,
    strides: Sequence[int] | None,
) -> Expr:
    if ceil_mode or auto_pad not in ("NOTSET", "VALID"):
        raise UnsupportedError("this form of AveragePool is not done in float64")

    def total(values: Expr) -> Expr:
        padded = _padded(op, values, pads, len(kernel_shape))
        places = itertools.product(*map(range, kernel_shape))
        return op.Sum(*(_window(op, padded, place, kernel_shape, strides, dilations) for place in places))

    return total(x) / (float(math.prod(kernel_shape)) if count_include_pad else total(op.filled_like(x.value, 1)))


def _spatial(x: Expr) -> list[int]:
    if x.value.shape is None:
        raise UnsupportedError("the rank of an image must be known")
    return list(range(2, x.value.shape.rank()))


def _with_bias(op: Builder, y: Expr, b: Expr | None, rank: int) -> Expr:
    return y if b is None else y + op.Unsqueeze(b, list(range(1, 1 + rank)))


def _at(op: Builder, w: Expr, place: Sequence[int]) -> Expr:
    """The weights at one place of a kernel."""
    return op.Slice(w, list(place), [i + 1 for i in place], list(range(2, 2 + len(place))))


def _spread(op: Builder, x: Expr, strides: Sequence[int]) -> Expr:
    """The image with zeros between its elements, `strides` apart."""
    for axis, stride in enumerate(strides, start=2):
        if stride > 1:
            rank = 2 + len(strides)
            pads = [0] * (2 * rank + 2)
            pads[rank + 1 + axis + 1] = stride - 1
            size = op.Shape(x, start=axis, end=axis + 1)
            spread = op.Pad(op.Unsqueeze(x, [axis + 1]), pads)
            shape = op.Concat(op.Shape(x, end=axis), size * stride, op.Shape(x, start=axis + 1), axis=0)
            x = op.Slice(op.Reshape(spread, shape), [0], [1 - stride], [axis])
    return x


def _padded(op: Builder, x: Expr, pads: Sequence[int] | None, rank: int) -> Expr:
    if not pads or not any(pads):
        return x
    return op.Pad(x, [0, 0, *pads[:rank], 0, 0, *pads[rank:]])


def _window(
    op: Builder,
    x: Expr,
    place: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int] | None,
    dilations: Sequence[int] | None,
) -> Expr:
    """What lies under one place of a kernel as it moves over an image."""
    dilations = dilations or [1] * len(kernel)
    starts = [p * d for p, d in zip(place, dilations, strict=True)]
    after = [(k - 1 - p) * d for k, p, d in zip(kernel, place, dilations, strict=True)]
    ends = [-n if n else np.iinfo(np.int64).max for n in after]
    return op.Slice(x, starts, ends, list(range(2, 2 + len(kernel))), list(strides or [1] * len(kernel)))
