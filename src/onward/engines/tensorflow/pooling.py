"""Pooling. Windows that TensorFlow has kernels for slide over an image with channels last; others are taken apart."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.shared.windows import Pair, counts, paddings, reach, with_ceiling
from onward.engines.tensorflow.convolution import channels_first, channels_last
from onward.engines.tensorflow.tensors import scalar, sizes

operators = Operators()


class _Window(NamedTuple):
    """How a window slides over an image, per axis."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    pads: list[Pair]
    """What the operator says is around the image."""
    filled: list[Pair]
    """How much there must be, for windows at the end that are not full."""

    def places(self, shape):
        """Which elements of the image, with what is around it, are in each window, per axis: [window, element]."""
        for size, k, s, d, (before, after) in zip(shape, *self[:3], self.filled, strict=True):
            starts = np.arange(0, before + size + after - reach(k, d) + 1, s)
            yield starts[:, None] + d * np.arange(k)


def _window(x, kernel, auto_pad, ceil_mode, dilations, pads, strides):
    shape, rank = sizes(x, 2), len(kernel)
    slide = kernel, strides or [1] * rank, dilations or [1] * rank
    pads = paddings(auto_pad, pads, shape, *slide)
    return _Window(*slide, pads, with_ceiling(pads, shape, *slide) if ceil_mode else pads)


def _native(pool, x, window, filling):
    """A pooling function of TensorFlow, on an image that is filled up on all sides."""
    last, kernel, strides = channels_last(_fill_around(x, window, filling)), window.kernel, window.strides
    if len(kernel) == 1:
        return channels_first(pool(last[:, None], [1, *kernel], [1, *strides], "VALID")[:, 0])
    return channels_first(pool(last, kernel, strides, "VALID"))


def _fill_around(x, window, filling):
    widths = [(0, 0), (0, 0), *window.filled]
    return tf.pad(x, widths, constant_values=tf.cast(filling, x.dtype)) if np.any(widths) else x


def _has_kernel(x, window):
    types = (tf.float32,) if len(window.kernel) == 3 else (tf.float16, tf.bfloat16, tf.float32, tf.float64)
    return x.dtype in types and len(window.kernel) <= 3 and max(window.dilations) == 1


def _taken_apart(x, window, filling):
    """The elements of each window side by side: [N, C, windows..., elements]."""
    rank, y = len(window.kernel), _fill_around(x, window, filling)
    for axis, places in enumerate(window.places(x.shape[2:])):
        y = tf.gather(y, places, axis=2 + 2 * axis)
    y = tf.transpose(y, [0, 1, *range(2, 2 + 2 * rank, 2), *range(3, 3 + 2 * rank, 2)])
    return tf.reshape(y, [*y.shape[: 2 + rank], -1])


@operators.define("MaxPool")
def max_pool(x, *, auto_pad, ceil_mode, dilations, kernel_shape, pads, storage_order, strides, outputs):
    window = _window(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    if outputs == 1 and _has_kernel(x, window):
        pool = tf.nn.max_pool3d if len(kernel_shape) == 3 else tf.nn.max_pool2d
        return _native(pool, x, window, -math.inf)
    lowest = -math.inf if x.dtype.is_floating else x.dtype.min
    elements = _taken_apart(x, window, lowest)
    chosen = tf.argmax(elements, -1)
    y = tf.gather(elements, chosen, batch_dims=elements.shape.rank - 1)
    return y, _positions(x, window, chosen, storage_order)


def _positions(x, window, chosen, storage_order):
    """Where on the whole tensor, laid out flat, the chosen elements of windows are."""
    shape = sizes(x, 2)
    rank, elements = len(shape), np.unravel_index(np.arange(math.prod(window.kernel)), window.kernel)
    flat = np.zeros([1] * (rank + 1), np.int64)
    for axis, (places, (before, _)) in enumerate(zip(window.places(shape), window.filled, strict=True)):
        step = math.prod(shape[:axis]) if storage_order else math.prod(shape[axis + 1 :])
        inside = np.clip(places - before, 0, shape[axis] - 1)[:, elements[axis]] * step
        flat = flat + inside.reshape([len(inside) if i == axis else 1 for i in range(rank)] + [-1])
    planes = np.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], *[1] * rank) * math.prod(shape)
    spread = tf.broadcast_to(tf.constant(flat), [*x.shape[:2], *flat.shape])
    return tf.gather(spread, chosen, batch_dims=chosen.shape.rank) + planes


@operators.define("AveragePool")
def average_pool(x, *, auto_pad, ceil_mode, count_include_pad, dilations, kernel_shape, pads, strides):
    window = _window(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    numbers = _numbers(sizes(x, 2), window, count_include_pad)
    if (numbers == math.prod(kernel_shape)).all():
        return _means(x, window)
    return _means(x, window) * tf.constant(math.prod(kernel_shape) / numbers, x.dtype)


def _means(x, window):
    """The means of windows, in which what is outside counts as 0."""
    if _has_kernel(x, window):
        return _native(tf.nn.avg_pool3d if len(window.kernel) == 3 else tf.nn.avg_pool2d, x, window, 0)
    return tf.reduce_mean(_taken_apart(x, window, 0), -1)


def _numbers(shape, window, with_padding):
    """How many elements of each window count."""
    counted = window.pads if with_padding else [(0, 0)] * len(shape)
    per_axis = map(counts, shape, window.filled, counted, *window[:3])
    return np.maximum(functools.reduce(np.multiply.outer, per_axis), 1)


@operators.define("LpPool")
def lp_pool(x, *, auto_pad, ceil_mode, dilations, kernel_shape, p, pads, strides):
    window = _window(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    return _root(_means(tf.abs(x) ** p, window) * math.prod(kernel_shape), p)


def _root(x, p):
    """The derivative at 0 is 0."""
    zero = x == 0
    return tf.where(zero, scalar(0, x), tf.where(zero, scalar(1, x), x) ** (1 / p))


def _whole(reduce):
    """A function of all elements of each channel: [N, C, elements] -> [N, C, 1]."""

    def pooled(x, **attributes):
        channels, *shape = sizes(x, 1)
        planes = tf.reshape(x, [-1, channels, math.prod(shape)])
        return tf.reshape(reduce(planes, **attributes), [-1, channels, *[1] * len(shape)])

    return pooled


def _largest(x):
    """The first of the largest elements along the last axis, which has the whole gradient."""
    return tf.gather(x, tf.argmax(x, -1), batch_dims=x.shape.rank - 1)


operators(
    GlobalMaxPool=_whole(_largest),
    GlobalAveragePool=_whole(lambda x: tf.reduce_mean(x, -1)),
    GlobalLpPool=lambda x, *, p: _whole(lambda y: _root(tf.reduce_sum(tf.abs(y) ** p, -1), p))(x),
)


# ---- regions of interest ---------------------------------------------------------------------------------------------
