"""Interpolation: between the elements of a tensor, at places of a regular grid or of any."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.precision import in_float32
from onward.engines.shared.resize import resized_axes

operators = Operators()


@operators.define("Resize")
@in_float32
def resize(
    x, roi=None, scales=None, sizes=None, *,
    antialias, axes, coordinate_transformation_mode, cubic_coeff_a, exclude_outside, extrapolation_value,
    keep_aspect_ratio_policy, mode, nearest_mode,
):  # fmt: skip
    resized = resized_axes(
        x.shape, roi, scales, sizes,
        antialias=antialias, axes=axes, coordinate_transformation_mode=coordinate_transformation_mode,
        cubic_coeff_a=cubic_coeff_a, exclude_outside=exclude_outside,
        keep_aspect_ratio_policy=keep_aspect_ratio_policy, mode=mode, nearest_mode=nearest_mode,
    )  # fmt: skip
    y, outside = x, np.array(False)
    for axis, matrix, beyond, picks in resized:
        y = y.take(matrix.argmax(1), axis) if picks else np.moveaxis(np.moveaxis(y, axis, -1) @ matrix.T, -1, axis)
        outside = outside | beyond.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    return np.where(outside, extrapolation_value, y).astype(x.dtype)


@operators.define("AffineGrid")
@in_float32
def affine_grid(theta, size, *, align_corners):
    n, _, *sizes = size.tolist()
    lines = [np.linspace(-1, 1, m) if align_corners else (np.arange(m) * 2 + 1) / m - 1 for m in sizes]
    grid = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(sizes)], -1)
    points = grid.reshape(1, -1, len(sizes) + 1).astype(theta.dtype) @ theta.swapaxes(1, 2)
    return points.reshape(n, *sizes, len(sizes))
