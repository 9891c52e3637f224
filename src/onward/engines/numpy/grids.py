"""Interpolation: between the elements of a tensor, at places of a regular grid or of any."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.precision import in_float32
from onward.engines.shared.resize import cubic, resized_axes

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


@operators.define("GridSample")
@in_float32
def grid_sample(x, grid, *, align_corners, mode, padding_mode):
    sizes = np.array(x.shape[2:])
    grid = grid[..., ::-1]  # which counts axes from the last
    places = (grid + 1) / 2 * (sizes - 1) if align_corners else ((grid + 1) * sizes - 1) / 2
    if mode == "nearest":
        places = np.rint(places)
    return sampled(x, _inside(places, sizes, padding_mode, align_corners), mode, padding_mode, align_corners)


def sampled(x, places, mode, padding_mode="zeros", align_corners=0):
    """The values of [N, C, *sizes] at [N, *counts, rank], as [N, C, *counts]."""
    sizes = np.array(x.shape[2:])
    rank, counts = len(sizes), places.shape[1:-1]
    first, reach = np.floor(places), {"nearest": [0], "linear": [0, 1], "cubic": [-1, 0, 1, 2]}[mode]
    y = np.zeros((*x.shape[:2], *counts), x.dtype)
    batch = np.arange(len(x)).reshape(-1, *[1] * len(counts))
    for offset in np.ndindex(*[len(reach)] * rank):
        taps = first + np.array([reach[i] for i in offset])
        distance = np.abs(places - taps)
        weights = {
            "nearest": lambda d: np.ones_like(d),
            "linear": lambda d: 1 - d,
            "cubic": lambda d: cubic(d, -0.75),
        }[mode](distance).prod(-1)
        taps = _inside(taps, sizes, padding_mode, align_corners)
        there = ((taps >= 0) & (taps < sizes)).all(-1)
        index = np.moveaxis(taps.clip(0, sizes - 1).astype(np.int64), -1, 0)
        values = x[(batch, slice(None), *index)]  # [N, *counts, C]
        y += np.moveaxis(values * (weights * there)[..., None], -1, 1).astype(x.dtype)
    return y


def _inside(places, sizes, padding_mode, align_corners):
    """Places, of which those outside are moved to the border, or are reflected there."""
    if padding_mode == "zeros":
        return places
    low, high = (0, sizes - 1) if align_corners else (-0.5, sizes - 0.5)
    moved = places.clip(0, sizes - 1)
    if padding_mode == "reflection":
        length = np.maximum(high - low, 1e-30)
        moved = np.abs((places - low + length) % (2 * length) - length) + low
    return np.where((places < low) | (places > high), moved, places)


@operators.define("AffineGrid")
@in_float32
def affine_grid(theta, size, *, align_corners):
    n, _, *sizes = size.tolist()
    lines = [np.linspace(-1, 1, m) if align_corners else (np.arange(m) * 2 + 1) / m - 1 for m in sizes]
    grid = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(sizes)], -1)
    points = grid.reshape(1, -1, len(sizes) + 1).astype(theta.dtype) @ theta.swapaxes(1, 2)
    return points.reshape(n, *sizes, len(sizes))
