"""Values between the elements of a grid."""

from __future__ import annotations

import functools
import itertools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from onward.run.framework import Operators

operators = Operators()


# ---- Resize ----------------------------------------------------------------------------------------------------------


@operators.define("Resize")
def resize(
    x,
    roi=None,
    scales=None,
    sizes=None,
    *,
    antialias,
    axes=None,
    coordinate_transformation_mode,
    cubic_coeff_a,
    exclude_outside,
    extrapolation_value,
    keep_aspect_ratio_policy,
    mode,
    nearest_mode,
):
    axes = range(x.ndim) if axes is None else [axis % x.ndim for axis in axes]
    old = [x.shape[axis] for axis in axes]
    factors, new = _sizes(old, scales, sizes, keep_aspect_ratio_policy)
    regions = roi.reshape(2, -1).T.tolist() if roi is not None and roi.size else [(0, 1)] * len(old)
    beyond = []
    for axis, size, factor, length, region in zip(axes, old, factors, new, regions, strict=True):
        at = _places(coordinate_transformation_mode, size, factor, length, region)
        if coordinate_transformation_mode == "tf_crop_and_resize":
            beyond.append((axis, (at < 0) | (at > size - 1)))
        elif size == length and np.array_equal(at, np.arange(size)):
            continue
        taps, weights = _taps(at, size, factor if antialias and factor < 1 else 1, mode, nearest_mode, cubic_coeff_a)
        if exclude_outside:
            weights = np.where((taps >= 0) & (taps < size), weights, 0)
            weights = weights / weights.sum(1, keepdims=True)
        x = _weighted(x, np.clip(taps, 0, size - 1), weights, axis)
    for axis, outside in beyond:
        x = jnp.where(outside.reshape([-1 if i == axis else 1 for i in range(x.ndim)]), extrapolation_value, x)
    return x.astype(x.dtype)


def _sizes(old, scales, sizes, policy):
    if sizes is None or not sizes.size:
        return scales.tolist(), [math.floor(size * scale) for size, scale in zip(old, scales.tolist(), strict=True)]
    factors = [new / size for new, size in zip(sizes.tolist(), old, strict=True)]
    if policy == "stretch":
        return factors, sizes.tolist()
    factor = min(factors) if policy == "not_larger" else max(factors)
    return [factor] * len(old), [math.floor(size * factor + 0.5) for size in old]


def _places(mode, size, factor, length, region):
    """Where each new element lies among the old ones."""
    new = np.arange(length)
    if mode == "align_corners":
        return new * ((size - 1) / (factor * size - 1)) if length > 1 else np.zeros(1)
    if mode == "asymmetric":
        return new / factor
    if mode == "pytorch_half_pixel" and length == 1:
        return np.zeros(1)
    if mode == "tf_crop_and_resize":
        start, end = region
        if length == 1:
            return np.array([(start + end) * (size - 1) / 2])
        return start * (size - 1) + new * ((end - start) * (size - 1) / (length - 1))
    if mode == "half_pixel_symmetric":
        adjustment = length / (factor * size)
        return size / 2 * (1 - adjustment) + (new + 0.5) / factor - 0.5
    return (new + 0.5) / factor - 0.5


def _taps(at, size, factor, mode, nearest_mode, a):
    """The old elements that make up each new one, and their weights. Smaller by `factor`, the filter is wider."""
    if mode == "nearest":
        return _nearest(at, nearest_mode)[:, None], np.ones((len(at), 1))
    support = (1 if mode == "linear" else 2) / factor
    first = np.ceil(at - support) if factor < 1 else np.floor(at) - support + 1
    taps = first[:, None] + np.arange(2 * math.ceil(support) + (factor < 1))
    distance = np.abs(taps - at[:, None]) * factor
    weights = np.maximum(1 - distance, 0) if mode == "linear" else _cubic(distance, a)
    return taps.astype(np.int64), weights / weights.sum(1, keepdims=True)


def _nearest(at, mode):
    rounded = {
        "floor": np.floor,
        "ceil": np.ceil,
        "round_prefer_floor": lambda at: np.ceil(at - 0.5),
        "round_prefer_ceil": lambda at: np.floor(at + 0.5),
    }[mode](at)
    return rounded.astype(np.int64)


def _cubic(distance, a):
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


def _weighted(x, taps, weights, axis):
    if taps.shape[1] == 1:
        return jnp.take(x, taps[:, 0], axis)
    weights = weights.reshape([*weights.shape, *[1] * (x.ndim - 1 - axis)])
    exact = jnp.promote_types(x.dtype, np.float32)
    taken = jnp.take(x, taps, axis).astype(exact) * weights.astype(exact)
    total = jnp.sum(taken, axis + 1)
    return total.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.round(total).astype(x.dtype)


# ---- GridSample ------------------------------------------------------------------------------------------------------


@operators.define("GridSample")
def grid_sample(x, grid, *, align_corners, mode, padding_mode):
    sizes = x.shape[2:]
    places = [
        (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2
        for at, size in zip(jnp.moveaxis(grid, -1, 0)[::-1], sizes, strict=True)
    ]
    if mode == "nearest":
        return _gathered(x, [_within(jnp.round(at), size, padding_mode, align_corners) for at, size in zip(places, sizes, strict=True)])
    if mode == "linear":
        places = [_within(at, size, padding_mode, align_corners) for at, size in zip(places, sizes, strict=True)]
        return linear(x, places)
    base = [jnp.floor(at) for at in places]
    parts = []
    for shifts in itertools.product(range(-1, 3), repeat=len(sizes)):
        at = [_within(b + s, size, padding_mode, align_corners) for b, s, size in zip(base, shifts, sizes, strict=True)]
        weights = (_cubic_weight(jnp.abs(p - (b + s))) for p, b, s in zip(places, base, shifts, strict=True))
        parts.append(_gathered(x, at) * functools.reduce(operator.mul, weights)[:, None])
    return sum(parts).astype(x.dtype)


def _cubic_weight(distance, a=-0.75):
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return jnp.where(distance <= 1, near, far)


def _within(at, size, mode, align_corners):
    """Places outside of the grid, brought into it, or left there."""
    if mode == "zeros":
        return at
    if mode == "reflection":
        low, high = (0, size - 1) if align_corners else (-0.5, size - 0.5)
        if high == low:
            return jnp.zeros_like(at)
        over = jnp.abs(at - low) % (2 * (high - low))
        at = jnp.where(over > high - low, 2 * (high - low) - over, over) + low
    return jnp.clip(at, 0, size - 1)


def linear(x, places):
    """Between neighbours; outside of the grid are zeros. Places are one array per axis, (batch, *points)."""
    return sum(linear_corners(x, places))


def linear_corners(x, places):
    """The parts that each of the neighbours has in it."""
    base = [jnp.floor(at) for at in places]
    for shifts in itertools.product((0, 1), repeat=len(places)):
        weights = ((at - b) if s else (1 - (at - b)) for at, b, s in zip(places, base, shifts, strict=True))
        weight = functools.reduce(operator.mul, weights)
        yield _gathered(x, [b + s for b, s in zip(base, shifts, strict=True)]) * weight[:, None].astype(x.dtype)


def _gathered(x, places):
    """The elements at whole places; outside are zeros."""
    limits = list(zip(places, x.shape[2:], strict=True))
    inside = functools.reduce(operator.and_, ((at >= 0) & (at <= size - 1) for at, size in limits))
    indices = [jnp.clip(at, 0, size - 1).astype(np.int32) for at, size in limits]
    found = jax.vmap(lambda image, *at: image[:, *at])(x, *indices)
    return jnp.where(inside[:, None], found, 0)
