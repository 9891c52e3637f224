"""Resize is linear along each axis: here are its matrices, which only depend on sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


class ResizedAxis(NamedTuple):
    axis: int
    matrix: np.ndarray
    """[size after, size before]"""
    outside: np.ndarray
    """Which elements lie outside of the image, and are extrapolated."""
    picks: bool
    """Whether each element is one of those before."""


def resized_axes(
    shape: Sequence[int],
    roi: np.ndarray | None,
    scales: np.ndarray | None,
    sizes: np.ndarray | None,
    *,
    antialias: int,
    axes: Sequence[int] | None,
    coordinate_transformation_mode: str,
    cubic_coeff_a: float,
    exclude_outside: int,
    keep_aspect_ratio_policy: str,
    mode: str,
    nearest_mode: str,
) -> list[ResizedAxis]:
    """What a Resize with these inputs and attributes does to an image of a shape, axis by axis; others stay."""
    chosen = list(range(len(shape))) if axes is None else [axis % len(shape) for axis in axes]
    before = [shape[axis] for axis in chosen]
    if sizes is not None and sizes.size:
        factors, after = _by_sizes(before, sizes.tolist(), keep_aspect_ratio_policy)
    else:
        assert scales is not None
        factors = scales.tolist()
        after = [math.floor(n * factor) for n, factor in zip(before, factors, strict=True)]
    crops = coordinate_transformation_mode == "tf_crop_and_resize"
    regions = [(0.0, 1.0)] * len(chosen) if roi is None or not crops else list(zip(*np.split(roi, 2), strict=True))
    results = []
    for axis, n, factor, count, region in zip(chosen, before, factors, after, regions, strict=True):
        if factor == 1 and n == count and not crops:
            continue
        places = _places(coordinate_transformation_mode, n, count, factor, region)
        if mode == "nearest":
            matrix = _pick(places, n, nearest_mode)
        else:
            stretch = min(factor, 1.0) if antialias else 1.0
            matrix = _weigh_neighbours(places, n, mode, cubic_coeff_a, stretch, bool(exclude_outside))
        outside = (places < 0) | (places > n - 1) if crops else np.zeros(count, bool)
        results.append(ResizedAxis(axis, matrix, outside, mode == "nearest"))
    return results


ATTRIBUTES = (
    "antialias", "axes", "coordinate_transformation_mode", "cubic_coeff_a", "exclude_outside", "extrapolation_value",
    "keep_aspect_ratio_policy", "mode", "nearest_mode",
)  # fmt: skip


def as_resize(function: Callable[..., Any], shape_of: Callable[[Any], Sequence[int]] = lambda x: x.shape) -> Any:
    """The row of a table, of a function of the image, what is done along its axes, and two attributes."""

    def resize(x, roi=None, scales=None, sizes=None, *, mode, extrapolation_value, axes=None, **others):
        along = resized_axes(shape_of(x), roi, scales, sizes, mode=mode, axes=axes, **others)
        return function(x, along, extrapolation_value, mode)

    resize.asks_for = ATTRIBUTES  # type: ignore[attr-defined]
    return resize


def _by_sizes(before: list[int], sizes: list[int], policy: str) -> tuple[list[float], list[int]]:
    factors = [size / n for size, n in zip(sizes, before, strict=True)]
    if policy == "stretch":
        return factors, sizes
    factor = min(factors) if policy == "not_larger" else max(factors)
    return [factor] * len(before), [math.floor(n * factor + 0.5) for n in before]


def _places(mode: str, n: int, count: int, factor: float, region: Sequence[float]) -> np.ndarray:
    """Where the elements of the result are on the image."""
    x = np.arange(count, dtype=np.float64)
    start, end = region
    match mode:
        case "half_pixel":
            return (x + 0.5) / factor - 0.5
        case "half_pixel_symmetric":  # the centre stays where it is, although sizes are whole numbers
            return n / 2 * (1 - count / (factor * n)) + (x + 0.5) / factor - 0.5
        case "pytorch_half_pixel":
            return (x + 0.5) / factor - 0.5 if count > 1 else x * 0
        case "align_corners":
            last = factor * n - 1
            return x * (n - 1) / last if last > 0 else x * 0
        case "tf_crop_and_resize":
            if count == 1:
                return x + (start + end) * (n - 1) / 2
            return start * (n - 1) + x * (end - start) * (n - 1) / (count - 1)
    return x / factor  # asymmetric


def _pick(places: np.ndarray, n: int, rounding: str) -> np.ndarray:
    roundings: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "round_prefer_floor": lambda x: np.ceil(x - 0.5),
        "round_prefer_ceil": lambda x: np.floor(x + 0.5),
        "floor": np.floor,
        "ceil": np.ceil,
    }
    return np.eye(n)[np.clip(roundings[rounding](places), 0, n - 1).astype(int)]


def _weigh_neighbours(
    places: np.ndarray, n: int, mode: str, a: float, stretch: float, exclude_outside: bool
) -> np.ndarray:
    """Weights of the neighbours of each place. What is outside counts as the border, or is left out."""
    reach = math.ceil((1 if mode == "linear" else 2) / stretch)
    first = np.floor(places).astype(int)[:, None]
    neighbours = first + np.arange(1 - reach, 1 + reach)
    distance = np.abs(neighbours - places[:, None]) * stretch
    weights = np.maximum(1 - distance, 0) if mode == "linear" else _cubic(distance, a)
    if exclude_outside:
        weights = np.where((neighbours >= 0) & (neighbours < n), weights, 0)
    if exclude_outside or stretch < 1:
        weights = weights / weights.sum(1, keepdims=True)
    matrix = np.zeros((len(places), n))
    np.add.at(matrix, (np.arange(len(places))[:, None], np.clip(neighbours, 0, n - 1)), weights)
    return matrix


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    """The piecewise cubic kernel of Keys, of distances."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))
