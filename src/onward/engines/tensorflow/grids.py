"""Operators that sample images between their elements."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.shared.resize import as_resize
from onward.engines.tensorflow.tensors import sizes

operators = Operators()


@operators.define("Resize")
@functools.partial(as_resize, shape_of=sizes)
def resize(x, along, extrapolation_value, mode):
    rank, y = x.shape.rank, x if mode == "nearest" or x.dtype.is_floating else tf.cast(x, tf.float32)
    outside = np.zeros([1] * rank, bool)
    for one in along:
        y = tf.gather(y, one.matrix.argmax(1), axis=one.axis) if one.picks else _times(y, one.matrix, one.axis)
        outside = outside | one.outside.reshape([-1 if axis == one.axis else 1 for axis in range(rank)])
    y = y if y.dtype == x.dtype else tf.cast(tf.round(y), x.dtype)
    return tf.where(outside, tf.cast(extrapolation_value, y.dtype), y) if outside.any() else y


def _times(x, matrix, axis):
    """Each line of a tensor along an axis times a matrix."""
    rank = x.shape.rank
    product = tf.tensordot(x, tf.constant(matrix, x.dtype), [[axis], [1]])
    return tf.transpose(product, [*range(axis), rank - 1, *range(axis, rank - 1)])
