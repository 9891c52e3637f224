"""Pooling. Windows that TensorFlow has kernels for slide over an image with channels last."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.shared.pooling import count_elements, find_largest, place_windows, root, sum_windows
from onward.engines.tensorflow.convolution import channels_first, channels_last
from onward.engines.tensorflow.tensors import sizes

operators = Operators()


def _native(pool, x, windows, filling):
    """A pooling function of TensorFlow, on an image that is filled up on all sides."""
    widths = [(0, 0), (0, 0), *windows.added]
    filled = tf.pad(x, widths, constant_values=tf.cast(filling, x.dtype)) if np.any(widths) else x
    last, kernel, strides = channels_last(filled), windows.kernel, windows.strides
    if len(kernel) == 1:
        return channels_first(pool(last[:, None], [1, *kernel], [1, *strides], "VALID")[:, 0])
    return channels_first(pool(last, kernel, strides, "VALID"))


def _has_kernel(x, windows):
    types = (tf.float32,) if len(windows.kernel) == 3 else (tf.float16, tf.bfloat16, tf.float32, tf.float64)
    return x.dtype in types and len(windows.kernel) <= 3 and max(windows.dilations) == 1


@operators.define("MaxPool")
def max_pool(x, *, auto_pad, ceil_mode, dilations, kernel_shape, pads, storage_order, strides, outputs):
    sizes(x, 2)  # which must be known
    windows = place_windows(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    if outputs == 1 and _has_kernel(x, windows):
        return _native(tf.nn.max_pool3d if len(kernel_shape) == 3 else tf.nn.max_pool2d, x, windows, -math.inf)
    return find_largest(x, windows, -math.inf if x.dtype.is_floating else x.dtype.min, storage_order, outputs)


@operators.define("AveragePool")
def average_pool(x, *, auto_pad, ceil_mode, count_include_pad, dilations, kernel_shape, pads, strides):
    sizes(x, 2)
    windows = place_windows(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    numbers, all_of_them = count_elements(x, windows, count_include_pad), math.prod(kernel_shape)
    if not _has_kernel(x, windows):
        return sum_windows(x, windows) / tf.constant(numbers, x.dtype)
    means = _native(tf.nn.avg_pool3d if len(kernel_shape) == 3 else tf.nn.avg_pool2d, x, windows, 0)
    return means if (numbers == all_of_them).all() else means * tf.constant(all_of_them / numbers, x.dtype)


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
    GlobalLpPool=lambda x, *, p: _whole(lambda y: root(tf.reduce_sum(tf.abs(y) ** p, -1), p))(x),
)
