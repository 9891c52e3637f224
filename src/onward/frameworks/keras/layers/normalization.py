"""Layers that normalize."""

from __future__ import annotations

from typing import Any

import numpy as np

from onward.build import Expr
from onward.frameworks.keras.layer_table import Call, row
from onward.frameworks.keras.tensors import Tensor


@row("BatchNormalization")
def batch_normalization(c: Call, x: Tensor) -> Tensor:
    layer = c.layer
    axis = layer.axis % x.rank
    c.refuse_unless(axis in (1, x.rank - 1), f"normalizes along axis {axis}")
    c.refuse_unless(not layer.renorm if hasattr(layer, "renorm") else True, "renormalizes")
    last = axis == x.rank - 1
    mean, variance = c.weight(layer.moving_mean), c.weight(layer.moving_variance)
    y = c.op.BatchNormalization(
        x.moved if last else x.plain,
        _scale(c, mean, layer.gamma, 1.0),
        _scale(c, mean, layer.beta, 0.0),
        mean,
        variance,
        epsilon=float(layer.epsilon),
        momentum=float(layer.momentum),
    )
    return Tensor(x.shape, moved=y) if last else Tensor(x.shape, plain=y)


def _scale(c: Call, like: Expr, variable: Any, number: float) -> Expr:
    """A variable, or what stands in where the layer has none.

    A frozen scale says that statistics are frozen, too; so this one is computed, unless they are.
    """
    if variable is not None:
        return c.weight(variable)
    constant = c.constant(np.full(like.value.shape.numpy(), number, like.dtype.numpy()))  # type: ignore[union-attr]
    return c.op.Identity(constant).like(like.value) if c.layer.trainable else constant


@row("LayerNormalization")
def layer_normalization(c: Call, x: Tensor) -> Expr:
    layer = c.layer
    axes = sorted(axis % x.rank for axis in ([layer.axis] if isinstance(layer.axis, int) else layer.axis))
    c.refuse_unless(axes == list(range(axes[0], x.rank)), f"normalizes along the axes {axes}")
    c.refuse_unless(not layer.rms_scaling, "scales by the root of the mean square")
    scale = c.constant(np.ones([x.shape[a] or 1 for a in axes], np.float32)) if layer.gamma is None else None
    scale = c.weight(layer.gamma) if scale is None else scale
    bias = None if layer.beta is None else c.weight(layer.beta)
    return c.op.LayerNormalization(x.plain, scale, bias, axis=axes[0] - x.rank, epsilon=float(layer.epsilon))


@row("RMSNormalization")
def rms_normalization(c: Call, x: Tensor) -> Expr:
    layer = c.layer
    c.refuse_unless(layer.axis in (-1, [-1], x.rank - 1, [x.rank - 1]), f"normalizes along {layer.axis}")
    mean = c.op.ReduceMean(x.plain * x.plain, [-1], keepdims=1)
    return x.plain / c.op.Sqrt(mean + float(layer.epsilon)) * c.weight(layer.scale)


@row("GroupNormalization")
def group_normalization(c: Call, x: Tensor) -> Tensor:
    layer = c.layer
    last = layer.axis in (-1, x.rank - 1)
    c.refuse_unless(last or layer.axis == 1, f"normalizes along axis {layer.axis}")
    channels = int(x.shape[layer.axis])
    groups = channels if layer.groups == -1 else int(layer.groups)
    numbers = {"gamma": np.ones(channels, np.float32), "beta": np.zeros(channels, np.float32)}
    scale, bias = (
        c.constant(numbers[name]) if (variable := getattr(layer, name)) is None else c.weight(variable)
        for name in numbers
    )
    inputs = x.moved if last else x.plain, scale, bias
    y = c.op.GroupNormalization(*inputs, num_groups=groups, epsilon=float(layer.epsilon))
    return Tensor(x.shape, moved=y) if last else Tensor(x.shape, plain=y)
