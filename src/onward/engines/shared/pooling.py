"""Pools. What is combined are slices of whole tensors, one axis after the other: XLA makes one loop of them."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from onward.engines.framework import Operators
from onward.engines.shared.arrays import xp
from onward.engines.shared.windows import Pair, counts, paddings, reach, with_ceiling

operators = Operators()


class Windows(NamedTuple):
    """How windows slide over an image, per axis."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    asked: list[Pair]
    """What the node adds around the image."""
    added: list[Pair]
    """What is added in the end, for windows that are not full."""


def place_windows(x, kernel, auto_pad, ceil_mode, dilations, pads, strides):
    slide = kernel, strides or [1] * len(kernel), dilations or [1] * len(kernel)
    asked = paddings(auto_pad, pads, x.shape[2:], *slide)
    return Windows(*slide, asked, with_ceiling(asked, x.shape[2:], *slide) if ceil_mode else asked)


def combine_windows(combine, tensors, fills, windows):
    """Tensors, the same windows of which are combined."""
    widths = [(0, 0), (0, 0), *windows.added]
    tensors = [xp.pad(x, widths, constant_values=fill) for x, fill in zip(tensors, fills, strict=True)]
    for i, (length, stride, dilation) in reversed(list(enumerate(zip(*windows[:3], strict=True)))):
        last = (tensors[0].shape[2 + i] - reach(length, dilation)) // stride * stride
        starts = range(0, length * dilation, dilation)
        places = ((slice(None),) * (2 + i) + (slice(start, start + last + 1, stride),) for start in starts)
        tensors = functools.reduce(combine, ([x[place] for x in tensors] for place in places))
    return tensors


def _larger(first, second):
    """Whichever is larger, with what belongs to it; the first where they are equal."""
    better = (second[0] > first[0]) | (second[0] != second[0])
    return [xp.where(better, b, a) for a, b in zip(first, second, strict=True)]


def find_largest(x, windows, lowest, storage_order, outputs):
    """The largest elements of windows, and where on the whole tensor, laid out flat, they are."""
    if outputs == 1:
        return combine_windows(_larger, [x], [lowest], windows)[0]
    order = list(range(len(x.shape))) if storage_order == 0 else [0, 1, *reversed(range(2, len(x.shape)))]
    places = np.arange(math.prod(x.shape)).reshape([x.shape[i] for i in order]).transpose(np.argsort(order))
    return tuple(combine_windows(_larger, [x, places], [lowest, 0], windows))


def sum_windows(x, windows):
    return combine_windows(lambda first, second: [first[0] + second[0]], [x], [0], windows)[0]


def count_elements(x, windows, count_include_pad):
    """How many elements of each window count."""
    counted = windows.asked if count_include_pad else [(0, 0)] * len(windows.asked)
    return functools.reduce(np.multiply.outer, map(counts, x.shape[2:], windows.added, counted, *windows[:3]))


@operators.define("MaxPool")
def max_pool(x, *, auto_pad, ceil_mode, dilations=None, kernel_shape, pads=None, storage_order, strides=None, outputs):
    windows = place_windows(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    lowest = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf
    return find_largest(x, windows, lowest, storage_order, outputs)


@operators.define("AveragePool")
def average_pool(x, *, auto_pad, ceil_mode, count_include_pad, dilations=None, kernel_shape, pads=None, strides=None):
    windows = place_windows(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    return sum_windows(x, windows) / count_elements(x, windows, count_include_pad).astype(x.dtype)


@operators.define("LpPool")
def lp_pool(x, *, auto_pad, ceil_mode, dilations=None, kernel_shape, p, pads=None, strides=None):
    windows = place_windows(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    return root(sum_windows(xp.abs(x) ** p, windows), p)


def root(x, p):
    """The derivative at 0 is 0."""
    return xp.where(x == 0, x, xp.where(x == 0, xp.ones_like(x), x) ** (1 / p))


def _space(x):
    return tuple(range(2, len(x.shape)))


operators(
    GlobalMaxPool=lambda x: xp.max(x, _space(x), keepdims=True),
    GlobalAveragePool=lambda x: xp.mean(x, _space(x), keepdims=True),
    GlobalLpPool=lambda x, *, p: root(xp.sum(xp.abs(x) ** p, _space(x), keepdims=True), p),
)
