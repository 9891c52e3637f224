"""Functions of `keras.activations`, and activation layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from onward.build import Builder, Expr
from onward.frameworks.formulas.graph_building import same_operator
from onward.frameworks.keras.layers import ROWS, Call, LayerTensor, row
from onward.vocabulary.keras import Refused


def activate(c: Call, function: Any, x: LayerTensor) -> LayerTensor:
    if function is None:
        return x
    name = getattr(function, "__name__", type(function).__name__)
    is_keras = getattr(function, "__module__", "").startswith("keras.")
    if is_keras and name == "linear":
        return x
    if is_keras and name == "softmax":
        return softmax(c, x, -1)
    if is_keras and name == "log_softmax":
        return LayerTensor(x.shape, plain=c.op.LogSoftmax(x.plain, axis=-1))
    if not is_keras or name not in _ELEMENTWISE:
        raise Refused(f"has the activation `{name}`")
    options = {}
    if name == "gelu" and inspect.signature(function).parameters["approximate"].default:  # that of `keras.ops`
        options["approximate"] = "tanh"
    result = x.map(lambda expr: _ELEMENTWISE[name](c.op, expr, **options))
    if name == "sigmoid":
        result.logits = x
    return result


def softmax(c: Call, x: LayerTensor, axis: int) -> LayerTensor:
    result = LayerTensor(x.shape, plain=c.op.Softmax(x.plain, axis=axis))
    result.logits = x
    return result


def _hard_tanh(op: Builder, x: Expr) -> Expr:
    """Clip to -1 and 1. The slope at the bounds is 0 on PyTorch, and 1 on other backends."""
    if keras.backend.backend() != "torch":
        return op.Clip(x, -1.0, 1.0)
    return op.Where(x <= -1.0, -1.0, op.Where(x >= 1.0, 1.0, x))


def _leaky_relu(op: Builder, x: Expr, slope: float) -> Expr:
    """Multiply x by a slope below 0. At 0, the slope is 1 on JAX, and `slope` on other backends."""
    return op.Where(x < 0.0, x * slope, x) if keras.backend.backend() == "jax" else op.LeakyRelu(x, alpha=slope)


def _at_most(op: Builder, x: Expr, most: float) -> Expr:
    """Return `min(x, most)`. If they are equal, the slope is 0.5 on JAX, and 1 elsewhere."""
    return op.Min(x, most) if keras.backend.backend() == "jax" else op.Clip(x, None, most)


def _hard_sigmoid(op: Builder, x: Expr) -> Expr:
    """Compute relu6(x + 3) / 6. HardSigmoid rounds differently, and losses take logarithms."""
    return op.Clip(x + 3.0, 0.0, 6.0) / 6.0


_SAME = ("Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Tanh")
_ELEMENTWISE: dict[str, Callable[..., Expr]] = {
    **{name.lower(): same_operator(name) for name in _SAME},
    "gelu": lambda op, x, **options: op.Gelu(x, **options),
    "leaky_relu": lambda op, x: _leaky_relu(op, x, 0.2),
    "relu6": lambda op, x: op.Clip(x, 0.0, 6.0),
    "elu": lambda op, x: op.Elu(x, alpha=1.0),
    "celu": lambda op, x: op.Celu(x, alpha=1.0),
    "soft_shrink": lambda op, x: op.Shrink(x, lambd=0.5, bias=0.5),
    "hard_shrink": lambda op, x: op.Shrink(x, lambd=0.5, bias=0.0),
    "tanh_shrink": lambda op, x: x - op.Tanh(x),
    "silu": lambda op, x: x * op.Sigmoid(x),
    "squareplus": lambda op, x: (x + op.Sqrt(x * x + 4.0)) * 0.5,
    "hard_tanh": _hard_tanh,
    "log_sigmoid": lambda op, x: -op.Softplus(-x),
    "exponential": lambda op, x: op.Exp(x),
    "hard_sigmoid": _hard_sigmoid,
    "hard_silu": lambda op, x: x * _hard_sigmoid(op, x),
    "mish": lambda op, x: x * op.Tanh(op.Softplus(x)),
}


ROWS(
    Activation=lambda c, x: activate(c, c.layer.activation, x),
    LeakyReLU=lambda c, x: x.map(lambda e: _leaky_relu(c.op, e, float(c.layer.negative_slope))),
    ELU=lambda c, x: x.map(lambda e: c.op.Elu(e, alpha=float(c.layer.alpha))),
    PReLU=lambda c, x: c.op.PRelu(x.plain, c.weight(c.layer.alpha)),
)


@row("Softmax")
def softmax_layer(c: Call, x: LayerTensor) -> LayerTensor:
    c.refuse_unless(isinstance(c.layer.axis, int), "has several axes")
    return softmax(c, x, c.layer.axis)


@row("ReLU")
def relu(c: Call, x: LayerTensor) -> LayerTensor:
    layer = c.layer
    c.refuse_unless(not layer.threshold, f"has the threshold {layer.threshold}")
    slope, most = float(layer.negative_slope), layer.max_value
    if most == 6 and not slope:
        return x.map(lambda e: c.op.Clip(e, 0.0, 6.0))
    result = x.map(lambda e: _leaky_relu(c.op, e, slope) if slope else c.op.Relu(e))
    return result if most is None else result.map(lambda e: _at_most(c.op, e, float(most)))


@row("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D")
def dropout(c: Call, x: LayerTensor) -> LayerTensor | Expr:
    """Drop elements, or whole slices by dropping ones of their common shape."""
    ratio = np.float32(c.layer.rate)
    if c.is_frozen:
        return x
    shape = _noise_shape(c, x)
    if shape is None:
        return x.map(lambda e: c.op.Dropout(e, ratio))
    ones = c.op.filled_like(x.plain.value, 1.0)
    axes = [axis for axis, size in enumerate(shape) if size == 1]
    return x.plain * c.op.Dropout(c.op.ReduceMax(ones, axes, keepdims=1), ratio)


def _noise_shape(c: Call, x: LayerTensor) -> list[int | None] | None:
    layer = c.layer
    if type(layer).__name__ == "Dropout":
        return None if layer.noise_shape is None else list(layer.noise_shape)
    last = getattr(layer, "data_format", "channels_last") == "channels_last"
    return [None, *[1] * (x.rank - 2), None] if last else [None, None, *[1] * (x.rank - 2)]
