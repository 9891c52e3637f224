"""Operators that sample images between their elements."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.shared.resize import resized_axes
from onward.engines.tensorflow.tensors import FLOATS, computed_as, scalar, sizes

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


# ---- sampling at given points ----------------------------------------------------------------------------------------


def elements_at(x, places):
    """Of images [N, C, ...] the elements at places [N, P], one whole number per axis: [N, C, P], 0 outside."""
    n, channels, *shape = sizes(x)
    rows = tf.transpose(tf.reshape(x, [n, channels, -1]), [0, 2, 1])
    inside = tf.reduce_all([(place >= 0) & (place < size) for place, size in zip(places, shape, strict=True)], 0)
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    flat = sum(tf.cast(place, tf.int64) * step for place, step in zip(places, steps, strict=True))
    found = tf.gather(rows, tf.where(inside, flat, 0), batch_dims=1)
    return tf.transpose(tf.where(inside[..., None], found, scalar(0, x)), [0, 2, 1])


def corners(x, points):
    """The elements round each point, [N, C, P], with their weights in linear interpolation, [N, 1, P]."""
    lower = [tf.floor(point) for point in points]
    for corner in itertools.product((0, 1), repeat=len(points)):
        places = [low + step for low, step in zip(lower, corner, strict=True)]
        above = [point - low for point, low in zip(points, lower, strict=True)]
        weights = [share if step else 1 - share for share, step in zip(above, corner, strict=True)]
        yield math.prod(weights)[:, None], elements_at(x, places)


def linear(x, points):
    """Images between their elements, at points given by one number per axis, [N, P]: [N, C, P]."""
    return sum(weight * value for weight, value in corners(x, points))


@operators.define("GridSample")
def grid_sample(x, grid, *, align_corners, mode, padding_mode):
    shape = sizes(x, 2)
    n, *places, _ = sizes(grid)
    flat = tf.reshape(grid, [n, -1, len(shape)])
    points = [_on_image(flat[..., -1 - axis], size, align_corners) for axis, size in enumerate(shape)]

    def each(function, values):
        return [function(x, size, padding_mode, align_corners) for x, size in zip(values, shape, strict=True)]

    if mode == "cubic":
        y = _cubic(x, each(_from_outside, points), functools.partial(each, _brought_back))
    else:
        points = each(_brought_back, points)
        y = linear(x, points) if mode == "linear" else elements_at(x, [tf.round(point) for point in points])
    return tf.reshape(y, [n, x.shape[1], *places])


def _on_image(point, size, align_corners):
    """From -1 to 1 between the centres or the outer borders of the first and the last element."""
    return (point + 1) / 2 * (size - 1) if align_corners else ((point + 1) * size - 1) / 2


def _brought_back(point, size, mode, align_corners):
    """What is outside, where it is taken from."""
    if mode == "zeros":
        return point
    return _clipped(_mirrored(point, size, align_corners) if mode == "reflection" else point, size)


def _mirrored(point, size, align_corners):
    """At the centres or the outer borders of the first and the last element, as often as it takes."""
    low, extent = (0.0, max(size - 1.0, 1.0)) if align_corners else (-0.5, float(size))
    away = tf.math.floormod(point - low, 2 * extent)
    return low + tf.where(away > extent, 2 * extent - away, away)


def _clipped(point, size):
    """On the image; on its border the derivative is 0."""
    last = scalar(size - 1, point)
    return tf.where(point <= 0, scalar(0, point), tf.where(point >= last, last, point))


def _from_outside(point, size, mode, align_corners):
    """For a cubic kernel only points outside are brought back at first: what is round others may be outside, too."""
    if mode == "reflection":
        return _mirrored(point, size, align_corners)
    beyond = 0.0 if align_corners else 0.5
    outside = (point < -beyond) | (point > size - 1 + beyond)
    return tf.where(outside, _clipped(point, size), point) if mode == "border" else point


def _cubic(x, points, brought_back):
    lower = [tf.floor(point) for point in points]
    weights = [_keys(point - low) for point, low in zip(points, lower, strict=True)]
    total = 0
    for taps in itertools.product(range(4), repeat=len(points)):
        places = [low + (tap - 1) for low, tap in zip(lower, taps, strict=True)]
        weight = math.prod(four[tap] for four, tap in zip(weights, taps, strict=True))
        total += weight[:, None] * elements_at(x, brought_back(places))
    return total


def _keys(t, a=-0.75):
    """Weights of two neighbours below and two above, of which the nearer ones are `t` and 1 - `t` away."""

    def near(t):
        return ((a + 2) * t - (a + 3)) * t * t + 1

    def far(t):
        return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a

    return far(1 + t), near(t), near(1 - t), far(2 - t)


@operators.define("AffineGrid")
def affine_grid(theta, size, *, align_corners):
    """Points from -1 to 1 along each axis, the last axis first, under a linear map."""
    n, _, *shape = size.tolist()
    lines = [np.linspace(-1, 1, k) if align_corners else (2 * np.arange(k) + 1) / k - 1 for k in shape]
    points = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(shape)], -1).reshape(-1, len(shape) + 1)
    moved = computed_as(tf.matmul, FLOATS)(tf.constant(points, theta.dtype), theta, transpose_b=True)
    return tf.reshape(moved, [n, *shape, len(shape)])
