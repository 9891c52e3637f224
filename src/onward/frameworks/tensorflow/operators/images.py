"""Images in other sizes."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.frameworks.tensorflow.operators.convolution import channels_first, channels_last

operators = Operators()


def _resize(op, x, sizes, mode, align_corners, half_pixel_centers, **more):
    """Where the places of new elements lie on the old image, TensorFlow says with two switches."""
    places = "align_corners" if align_corners else "half_pixel" if half_pixel_centers else "asymmetric"
    images = channels_first(op, x, "NHWC")
    whole = op.Concat(op.Shape(images, start=0, end=2), np.array(sizes, np.int64), axis=0)
    y = op.Resize(images, None, None, whole, mode=mode, coordinate_transformation_mode=places, **more)
    return channels_last(op, y, "NHWC")


@operators.define("ResizeBilinear")
def bilinear(op, x, _, *, align_corners, half_pixel_centers, node):
    return _resize(op, x, node.numbers(1), "linear", align_corners, half_pixel_centers)


@operators.define("ResizeNearestNeighbor")
def nearest(op, x, _, *, align_corners, half_pixel_centers, node):
    rounding = "round_prefer_ceil" if align_corners or half_pixel_centers else "floor"
    return _resize(op, x, node.numbers(1), "nearest", align_corners, half_pixel_centers, nearest_mode=rounding)
