"""Pools."""

from __future__ import annotations

import functools
import math

import numpy as np
from keras import ops

from onward.engines.framework import Operators
from onward.engines.keras.convolution import on_windows
from onward.engines.keras.values import available, dtype_of, is_float
from onward.engines.shared.windows import counts, paddings, reach, with_ceiling

operators = Operators()


def place_windows(x, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides):
    """Strides, dilations, what the node adds around, and what is added in the end."""
    count = len(x.shape) - 2
    strides, dilations = strides or [1] * count, dilations or [1] * count
    asked = paddings(auto_pad, pads, x.shape[2:], kernel_shape, strides, dilations)
    added = with_ceiling(asked, x.shape[2:], kernel_shape, strides, dilations) if ceil_mode else asked
    return strides, dilations, asked, added


def over_windows(combine, tensors, fills, kernel, strides, dilations, added):
    """Tensors, the same windows of which are combined, one axis after the other."""
    amounts = [(0, 0), (0, 0), *added]
    tensors = [ops.pad(x, amounts, constant_values=fill) for x, fill in zip(tensors, fills, strict=True)]
    for axis in reversed(range(2, len(amounts))):
        length, stride, dilation = kernel[axis - 2], strides[axis - 2], dilations[axis - 2]
        last = (tensors[0].shape[axis] - reach(length, dilation)) // stride * stride
        before = (slice(None),) * axis
        starts = range(0, length * dilation, dilation)
        tensors = functools.reduce(
            combine, ([x[(*before, slice(i, i + last + 1, stride))] for x in tensors] for i in starts)
        )
    return tensors


def larger(first, second):
    """Whichever is larger, with what belongs to it; the first where they are equal."""
    better = second[0] > first[0]
    return [ops.where(better, b, a) for a, b in zip(first, second, strict=True)]


def add_up(first, second):
    return [first[0] + second[0]]


@operators.define("MaxPool")
def max_pool(
    x,
    *,
    auto_pad="NOTSET",
    ceil_mode=0,
    dilations=None,
    kernel_shape,
    pads=None,
    storage_order=0,
    strides=None,
    outputs=1,
):
    strides, dilations, _, added = place_windows(x, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    lowest = -np.inf if is_float(x) else np.iinfo(dtype_of(x)).min
    if outputs == 1 and is_float(x) and set(dilations) == {1}:

        def pooled(x, layout):
            return ops.max_pool(x, tuple(kernel_shape), tuple(strides), "valid", layout)

        return on_windows(pooled, x, added, lowest)
    if outputs == 1:
        return over_windows(larger, [x], [lowest], kernel_shape, strides, dilations, added)[0]
    order = range(len(x.shape)) if storage_order == 0 else (0, 1, *reversed(range(2, len(x.shape))))
    places = np.arange(math.prod(x.shape)).reshape([x.shape[i] for i in order]).transpose(np.argsort(order))
    tensors = [x, ops.convert_to_tensor(places, available("int64"))]
    return tuple(over_windows(larger, tensors, [lowest, 0], kernel_shape, strides, dilations, added))


@operators.define("AveragePool")
def average_pool(
    x,
    *,
    auto_pad="NOTSET",
    ceil_mode=0,
    count_include_pad=0,
    dilations=None,
    kernel_shape,
    pads=None,
    strides=None,
):
    strides, dilations, asked, added = place_windows(x, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    counted = asked if count_include_pad else [(0, 0)] * len(asked)
    per_axis = map(counts, x.shape[2:], added, counted, kernel_shape, strides, dilations)
    number, size = functools.reduce(np.multiply.outer, per_axis), math.prod(kernel_shape)
    if set(dilations) == {1}:

        def pooled(x, layout):
            return ops.average_pool(x, tuple(kernel_shape), tuple(strides), "valid", layout)

        mean = on_windows(pooled, x, added)
        return mean if (number == size).all() else mean * ops.convert_to_tensor(size / number, dtype_of(x))
    total = over_windows(add_up, [x], [0], kernel_shape, strides, dilations, added)[0]
    return total / ops.convert_to_tensor(number, dtype_of(x))


@operators.define("LpPool")
def lp_pool(x, *, auto_pad="NOTSET", ceil_mode=0, dilations=None, kernel_shape, p=2, pads=None, strides=None):
    strides, dilations, _, added = place_windows(x, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    powers = ops.power(ops.abs(x), p)
    return ops.power(over_windows(add_up, [powers], [0], kernel_shape, strides, dilations, added)[0], 1 / p)


def space(x):
    return tuple(range(2, len(x.shape)))


@operators.define("GlobalMaxPool")
def global_max_pool(x):
    return ops.max(x, space(x), keepdims=True)


@operators.define("GlobalAveragePool")
def global_average_pool(x):
    return ops.mean(x, space(x), keepdims=True)


@operators.define("GlobalLpPool")
def global_lp_pool(x, *, p=2):
    return ops.power(ops.sum(ops.power(ops.abs(x), p), space(x), keepdims=True), 1 / p)
