"""Pools."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.engines.framework import Operators
from onward.engines.shared.windows import counts, paddings, reach, with_ceiling

operators = Operators()


def _place_windows(x, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides):
    """Strides, dilations, what the node adds around, and what is added in the end."""
    count = x.ndim - 2
    strides, dilations = strides or [1] * count, dilations or [1] * count
    asked = paddings(auto_pad, pads, x.shape[2:], kernel_shape, strides, dilations)
    added = with_ceiling(asked, x.shape[2:], kernel_shape, strides, dilations) if ceil_mode else asked
    return strides, dilations, asked, added


def _over_windows(combine, tensors, fills, kernel, strides, dilations, added):
    """Tensors, the same windows of which are combined, one axis after the other.

    What is combined are slices of whole tensors: XLA makes one loop of them, and of their derivative. Its own windows
    are several times slower on CPUs.
    """
    amounts = [(0, 0, 0)] * 2 + [(*amount, 0) for amount in added]
    tensors = [lax.pad(x, jnp.asarray(fill, x.dtype), amounts) for x, fill in zip(tensors, fills, strict=True)]
    for axis in reversed(range(2, tensors[0].ndim)):
        length, stride, dilation = kernel[axis - 2], strides[axis - 2], dilations[axis - 2]
        last = (tensors[0].shape[axis] - reach(length, dilation)) // stride * stride
        starts = range(0, length * dilation, dilation)
        parts = ([lax.slice_in_dim(x, i, i + last + 1, stride, axis) for x in tensors] for i in starts)
        tensors = functools.reduce(combine, parts)
    return tensors


def _larger(first, second):
    """Whichever is larger, with what belongs to it; the first where they are equal."""
    better = (second[0] > first[0]) | jnp.isnan(second[0])
    return [jnp.where(better, b, a) for a, b in zip(first, second, strict=True)]


def _sum(x, *windows):
    return _over_windows(lambda first, second: [first[0] + second[0]], [x], [0], *windows)[0]


@operators.define("MaxPool")
def max_pool(x, *, auto_pad, ceil_mode, dilations=None, kernel_shape, pads=None, storage_order, strides=None, outputs):
    strides, dilations, _, added = _place_windows(x, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    lowest = -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else np.iinfo(x.dtype).min
    windows = kernel_shape, strides, dilations, added
    if outputs == 1:
        return _over_windows(_larger, [x], [lowest], *windows)[0]
    order = range(x.ndim) if storage_order == 0 else (0, 1, *reversed(range(2, x.ndim)))
    places = np.arange(x.size).reshape([x.shape[i] for i in order]).transpose(np.argsort(order))
    return tuple(_over_windows(_larger, [x, jnp.asarray(places)], [lowest, 0], *windows))


@operators.define("AveragePool")
def average_pool(x, *, auto_pad, ceil_mode, count_include_pad, dilations=None, kernel_shape, pads=None, strides=None):
    strides, dilations, asked, added = _place_windows(x, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    counted = asked if count_include_pad else [(0, 0)] * len(asked)
    per_axis = map(counts, x.shape[2:], added, counted, kernel_shape, strides, dilations)
    total = _sum(x, kernel_shape, strides, dilations, added)
    return total / functools.reduce(np.multiply.outer, per_axis).astype(x.dtype)


@operators.define("LpPool")
def lp_pool(x, *, auto_pad, ceil_mode, dilations=None, kernel_shape, p, pads=None, strides=None):
    strides, dilations, _, added = _place_windows(x, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    return _sum(jnp.abs(x) ** p, kernel_shape, strides, dilations, added) ** (1 / p)


def _space(x):
    return tuple(range(2, x.ndim))


operators(
    GlobalMaxPool=lambda x: jnp.max(x, _space(x), keepdims=True),
    GlobalAveragePool=lambda x: jnp.mean(x, _space(x), keepdims=True),
    GlobalLpPool=lambda x, *, p: jnp.sum(jnp.abs(x) ** p, _space(x), keepdims=True) ** (1 / p),
)
