"""Values between the elements of a grid."""

from __future__ import annotations

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np

from onward.engines.framework import Operators
from onward.engines.shared.resize import resized_axes

operators = Operators()


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
    resized = resized_axes(
        x.shape,
        roi,
        scales,
        sizes,
        antialias=antialias,
        axes=axes,
        coordinate_transformation_mode=coordinate_transformation_mode,
        cubic_coeff_a=cubic_coeff_a,
        exclude_outside=exclude_outside,
        keep_aspect_ratio_policy=keep_aspect_ratio_policy,
        mode=mode,
        nearest_mode=nearest_mode,
    )
    for axis, matrix, outside, picks in resized:
        x = jnp.take(x, matrix.argmax(1), axis) if picks else _combined(x, matrix, axis)
        if outside.any():
            along = outside.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
            x = jnp.where(along, extrapolation_value, x).astype(x.dtype)
    return x


def _combined(x, matrix, axis):
    """New elements along an axis, each a weighted sum of the old ones."""
    exact = jnp.promote_types(x.dtype, np.float32)
    y = jnp.moveaxis(jnp.tensordot(matrix.astype(exact), x.astype(exact), (1, axis)), 0, axis)
    return y.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.round(y).astype(x.dtype)


@operators.define("GridSample")
def grid_sample(x, grid, *, align_corners, mode, padding_mode):
    sizes = x.shape[2:]
    places = [
        (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2
        for at, size in zip(jnp.moveaxis(grid, -1, 0)[::-1], sizes, strict=True)
    ]
    if mode == "nearest":
        places = map(jnp.round, places)
    if mode != "cubic":
        places = [_within(at, size, padding_mode, align_corners) for at, size in zip(places, sizes, strict=True)]
        return linear(x, places) if mode == "linear" else _gathered(x, places)
    places = [_inside(at, size, padding_mode, align_corners) for at, size in zip(places, sizes, strict=True)]
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


def _inside(at, size, mode, align_corners):
    """Coordinates outside of the image, brought into it. It ends in the middle of the last element, or with it."""
    low, high = (0, size - 1) if align_corners else (-0.5, size - 0.5)
    if mode == "border":
        return jnp.where((at < low) | (at > high), jnp.clip(at, 0, size - 1), at)
    if mode == "zeros":
        return at
    if high == low:
        return jnp.zeros_like(at)
    over = jnp.abs(at - low) % (2 * (high - low))
    return jnp.where(over > high - low, 2 * (high - low) - over, over) + low


def _within(at, size, mode, align_corners):
    """Where there is an element, or outside of the image if zeros are around it."""
    return at if mode == "zeros" else jnp.clip(_inside(at, size, mode, align_corners), 0, size - 1)


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
