"""Operators that sample images between their elements."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.shared.resize import resized_axes
from onward.engines.tensorflow.tensors import FLOATS, computed_as, sizes

operators = Operators()


@operators.define("Resize")
def resize(
    x, roi=None, scales=None, new_sizes=None,
    *, antialias, axes, coordinate_transformation_mode, cubic_coeff_a, exclude_outside, extrapolation_value,
    keep_aspect_ratio_policy, mode, nearest_mode,
):  # fmt: skip
    resized = resized_axes(
        sizes(x), roi, scales, new_sizes,
        antialias=antialias, axes=axes, coordinate_transformation_mode=coordinate_transformation_mode,
        cubic_coeff_a=cubic_coeff_a, exclude_outside=exclude_outside,
        keep_aspect_ratio_policy=keep_aspect_ratio_policy, mode=mode, nearest_mode=nearest_mode,
    )  # fmt: skip
    rank, y = x.shape.rank, x if mode == "nearest" or x.dtype.is_floating else tf.cast(x, tf.float32)
    outside = np.zeros([1] * rank, bool)
    for one in resized:
        y = tf.gather(y, one.matrix.argmax(1), axis=one.axis) if one.picks else _times(y, one.matrix, one.axis)
        outside = outside | one.outside.reshape([-1 if axis == one.axis else 1 for axis in range(rank)])
    y = y if y.dtype == x.dtype else tf.cast(tf.round(y), x.dtype)
    return tf.where(outside, tf.cast(extrapolation_value, y.dtype), y) if outside.any() else y


def _times(x, matrix, axis):
    """Each line of a tensor along an axis times a matrix."""
    rank = x.shape.rank
    product = tf.tensordot(x, tf.constant(matrix, x.dtype), [[axis], [1]])
    return tf.transpose(product, [*range(axis), rank - 1, *range(axis, rank - 1)])


@operators.define("AffineGrid")
def affine_grid(theta, size, *, align_corners):
    """Points from -1 to 1 along each axis, the last axis first, under a linear map."""
    n, _, *shape = size.tolist()
    lines = [np.linspace(-1, 1, k) if align_corners else (2 * np.arange(k) + 1) / k - 1 for k in shape]
    points = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(shape)], -1).reshape(-1, len(shape) + 1)
    moved = computed_as(tf.matmul, FLOATS)(tf.constant(points, theta.dtype), theta, transpose_b=True)
    return tf.reshape(moved, [n, *shape, len(shape)])
