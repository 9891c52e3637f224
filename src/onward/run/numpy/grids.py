"""Interpolation: between the elements of a tensor, at places of a regular grid or of any."""

from __future__ import annotations

import math

import numpy as np

from onward.run.framework import Operators
from onward.run.numpy.precision import in_float32

operators = Operators()


@operators.define("Resize")
@in_float32
def resize(
    x, roi=None, scales=None, sizes=None, *,
    antialias, axes, coordinate_transformation_mode, cubic_coeff_a, exclude_outside, extrapolation_value,
    keep_aspect_ratio_policy, mode, nearest_mode,
):  # fmt: skip
    axes = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in axes]
    before = [x.shape[axis] for axis in axes]
    if scales is not None and scales.size:
        factors = [float(scale) for scale in scales]
        after = [math.floor(n * scale) for n, scale in zip(before, factors, strict=True)]
    else:
        after = sizes.tolist()
        factors = [m / n for n, m in zip(before, after, strict=True)]
        if keep_aspect_ratio_policy != "stretch":
            factors = [(min if keep_aspect_ratio_policy == "not_larger" else max)(factors)] * len(axes)
            after = [math.floor(n * factors[0] + 0.5) for n in before]
    starts, ends = (np.zeros(len(axes)), np.ones(len(axes))) if roi is None or not roi.size else np.split(roi, 2)
    outside = np.zeros([1] * x.ndim, bool)
    y = x
    for axis, n, m, scale, start, end in zip(axes, before, after, factors, starts, ends, strict=True):
        places = _original_places(coordinate_transformation_mode, n, m, scale, float(start), float(end))
        if coordinate_transformation_mode == "tf_crop_and_resize":
            beyond = (places < 0) | (places > n - 1)
            outside = outside | beyond.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
        elif n == m and scale == 1:
            continue
        if mode == "nearest":
            y = y.take(_nearest(nearest_mode, places).clip(0, n - 1), axis)
        else:
            matrix = _weights(mode, places, n, min(scale, 1) if antialias else 1, cubic_coeff_a, exclude_outside)
            y = np.moveaxis(np.moveaxis(y, axis, -1) @ matrix.T, -1, axis)
    return np.where(outside, extrapolation_value, y).astype(x.dtype)


def _original_places(mode, n, m, scale, start, end):
    """Where in an axis of `n` elements each of `m` new ones is. The new length may have a fraction, by its scale."""
    new, length = np.arange(m), scale * n
    if mode == "align_corners":
        return new * (n - 1) / (length - 1) if length != 1 else new * 0.0
    if mode == "asymmetric":
        return new / scale
    if mode == "tf_crop_and_resize":
        if length == 1:
            return np.array([0.5 * (start + end) * (n - 1)])
        return start * (n - 1) + new * (end - start) * (n - 1) / (length - 1)
    if mode == "pytorch_half_pixel" and m == 1:
        return new * 0.0
    centers = (new + 0.5) / scale - 0.5
    if mode == "half_pixel_symmetric":
        centers = centers + n / 2 * (1 - m / length)
    return centers


def _nearest(mode, places):
    rounded = {
        "round_prefer_floor": lambda x: np.ceil(x - 0.5),
        "round_prefer_ceil": lambda x: np.floor(x + 0.5),
        "floor": np.floor,
        "ceil": np.ceil,
    }[mode]
    return rounded(places).astype(np.int64)


def _weights(mode, places, n, scale, a, exclude_outside):
    """What each element gives to each new one: [new, old]. A scale below 1 widens the filter, against aliasing."""
    reach = math.ceil((2 if mode == "cubic" else 1) / scale)
    taps = np.floor(places)[:, None] + np.arange(1 - reach, reach + 1)
    distance = np.abs(taps - places[:, None]) * scale
    weights = _cubic(distance, a) if mode == "cubic" else np.maximum(1 - distance, 0)
    if exclude_outside:
        weights = np.where((taps >= 0) & (taps < n), weights, 0)
    weights = weights / weights.sum(1, keepdims=True)
    matrix = np.zeros((len(places), n))
    np.add.at(matrix, (np.arange(len(places))[:, None], taps.clip(0, n - 1).astype(np.int64)), weights)
    return matrix


def _cubic(distance, a):
    """The weight of an element at a distance (Keys, 1981)."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


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
            "cubic": lambda d: _cubic(d, -0.75),
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
