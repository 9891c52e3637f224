"""Pools and resizing.

A pool combines slices of full tensors, one axis after the other, which XLA fuses to one loop.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from onward.engines.framework import Operators
from onward.engines.shared.arrays import is_float, place_along, xp
from onward.engines.shared.windows import Pair, counts, paddings, reach, with_ceiling

operators = Operators()


class Windows(NamedTuple):
    """Parameters of sliding windows, per axis."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    asked: list[Pair]
    """Padding of the node."""
    added: list[Pair]
    """Padding with `ceil_mode`, for windows that are not full."""


def place_windows(x, kernel, auto_pad, ceil_mode, dilations, pads, strides):
    slide = kernel, strides or [1] * len(kernel), dilations or [1] * len(kernel)
    asked = paddings(auto_pad, pads, x.shape[2:], *slide)
    return Windows(*slide, asked, with_ceiling(asked, x.shape[2:], *slide) if ceil_mode else asked)


def combine_windows(combine, tensors, fills, windows):
    """Combine the elements of windows. All tensors have the same windows."""
    widths = [(0, 0), (0, 0), *windows.added]
    tensors = [xp.pad(x, widths, constant_values=fill) for x, fill in zip(tensors, fills, strict=True)]
    for i, (length, stride, dilation) in reversed(list(enumerate(zip(*windows[:3], strict=True)))):
        last = (tensors[0].shape[2 + i] - reach(length, dilation)) // stride * stride
        starts = range(0, length * dilation, dilation)
        slices = ((slice(None),) * (2 + i) + (slice(start, start + last + 1, stride),) for start in starts)
        tensors = functools.reduce(combine, ([x[index] for x in tensors] for index in slices))
    return tensors


def _larger(first, second):
    """Return the larger elements, and the tensors that belong to them. The first wins a tie."""
    better = (second[0] > first[0]) | (second[0] != second[0])
    return [xp.where(better, b, a) for a, b in zip(first, second, strict=True)]


def find_largest(x, windows, lowest, storage_order, outputs):
    """Return the maxima of windows, and their flat indices in the tensor, or in a sample if their number is unknown."""
    if outputs == 1:
        return combine_windows(_larger, [x], [lowest], windows)[0]
    order = list(range(len(x.shape))) if storage_order == 0 else [0, 1, *reversed(range(2, len(x.shape)))]
    shape = [1 if x.shape[i] is None else x.shape[i] for i in order]
    indices = np.arange(math.prod(shape)).reshape(shape).transpose(np.argsort(order))
    return tuple(combine_windows(_larger, [x, indices], [lowest, 0], windows))


def sum_windows(x, windows):
    return combine_windows(lambda first, second: [first[0] + second[0]], [x], [0], windows)[0]


def count_elements(x, windows, count_include_pad):
    """Return the number of elements of each window."""
    counted = windows.asked if count_include_pad else [(0, 0)] * len(windows.asked)
    return functools.reduce(np.multiply.outer, map(counts, x.shape[2:], windows.added, counted, *windows[:3]))


@operators.define("MaxPool")
def max_pool(x, *, auto_pad, ceil_mode, dilations=None, kernel_shape, pads=None, storage_order, strides=None, outputs):
    windows = place_windows(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    lowest = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf
    return find_largest(x, windows, lowest, storage_order, outputs)


@operators.define("AveragePool")
def average_pool(x, *, auto_pad, ceil_mode, count_include_pad, dilations=None, kernel_shape, pads=None, strides=None):
    windows = place_windows(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    return sum_windows(x, windows) / count_elements(x, windows, count_include_pad).astype(x.dtype)


@operators.define("LpPool")
def lp_pool(x, *, auto_pad, ceil_mode, dilations=None, kernel_shape, p, pads=None, strides=None):
    windows = place_windows(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    return root(sum_windows(xp.abs(x) ** p, windows), p)


def root(x, p):
    """Return the p-th root, with the derivative 0 at 0."""
    return xp.where(x == 0, x, xp.where(x == 0, xp.ones_like(x), x) ** (1 / p))


def _space(x):
    return tuple(range(2, len(x.shape)))


operators(
    GlobalMaxPool=lambda x: xp.max(x, _space(x), keepdims=True),
    GlobalAveragePool=lambda x: xp.mean(x, _space(x), keepdims=True),
    GlobalLpPool=lambda x, *, p: root(xp.sum(xp.abs(x) ** p, _space(x), keepdims=True), p),
)


# ---- Resize is linear along each axis: its matrices depend on sizes alone --------------------------------------------


class ResizedAxis(NamedTuple):
    axis: int
    matrix: np.ndarray
    """[size after, size before]"""
    outside: np.ndarray
    """True for elements outside of the image, which are extrapolated."""
    picks: bool
    """True if each element is one of the old elements."""


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
    """Return the changes of a Resize with these inputs and attributes, for each changed axis."""
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
        positions = _positions(coordinate_transformation_mode, n, count, factor, region)
        if mode == "nearest":
            matrix = _pick(positions, n, nearest_mode)
        else:
            stretch = min(factor, 1.0) if antialias else 1.0
            matrix = _weigh_neighbors(positions, n, mode, cubic_coeff_a, stretch, bool(exclude_outside))
        outside = (positions < 0) | (positions > n - 1) if crops else np.zeros(count, bool)
        results.append(ResizedAxis(axis, matrix, outside, mode == "nearest"))
    return results


ATTRIBUTES = (
    "antialias", "axes", "coordinate_transformation_mode", "cubic_coeff_a", "exclude_outside", "extrapolation_value",
    "keep_aspect_ratio_policy", "mode", "nearest_mode",
)  # fmt: skip


def as_resize(function: Callable[..., Any], shape_of: Callable[[Any], Sequence[int]] = lambda x: x.shape) -> Any:
    """Return Resize for a function of the image, its changed axes, and two attributes."""

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


def _positions(mode: str, n: int, count: int, factor: float, region: Sequence[float]) -> np.ndarray:
    """Return the positions of the new elements in the old image."""
    x = np.arange(count, dtype=np.float64)
    start, end = region
    match mode:
        case "half_pixel":
            return (x + 0.5) / factor - 0.5
        case "half_pixel_symmetric":  # keeps the center, although sizes are integers
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


def _pick(positions: np.ndarray, n: int, rounding: str) -> np.ndarray:
    roundings: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "round_prefer_floor": lambda x: np.ceil(x - 0.5),
        "round_prefer_ceil": lambda x: np.floor(x + 0.5),
        "floor": np.floor,
        "ceil": np.ceil,
    }
    return np.eye(n)[np.clip(roundings[rounding](positions), 0, n - 1).astype(int)]


def _weigh_neighbors(
    positions: np.ndarray, n: int, mode: str, a: float, stretch: float, exclude_outside: bool
) -> np.ndarray:
    """Return the weights of the neighbors of positions. Outside, the border counts, or nothing."""
    reach = math.ceil((1 if mode == "linear" else 2) / stretch)
    first = np.floor(positions).astype(int)[:, None]
    neighbors = first + np.arange(1 - reach, 1 + reach)
    distance = np.abs(neighbors - positions[:, None]) * stretch
    weights = np.maximum(1 - distance, 0) if mode == "linear" else _cubic(distance, a)
    if exclude_outside:
        weights = np.where((neighbors >= 0) & (neighbors < n), weights, 0)
    if exclude_outside or stretch < 1:
        weights = weights / weights.sum(1, keepdims=True)
    matrix = np.zeros((len(positions), n))
    np.add.at(matrix, (np.arange(len(positions))[:, None], np.clip(neighbors, 0, n - 1)), weights)
    return matrix


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    """Return the piecewise cubic kernel of Keys at distances x."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


# ---- grids -----------------------------------------------------------------------------------------------------------


@operators.define("Resize")
@as_resize
def resize(x, along, extrapolation_value, mode):
    for axis, matrix, outside, picks in along:
        x = xp.take(x, matrix.argmax(1), axis) if picks else _combine(x, matrix, axis)
        if outside.any():
            x = xp.where(place_along(outside, axis, x.ndim), extrapolation_value, x).astype(x.dtype)
    return x


def _combine(x, matrix, axis):
    """Return new elements along an axis, as weighted sums of the old ones."""
    exact = np.promote_types(x.dtype, np.float32)
    y = xp.moveaxis(xp.tensordot(x.astype(exact), matrix.astype(exact), (axis, 1)), -1, axis)
    return y.astype(x.dtype) if is_float(x.dtype) else xp.rint(y).astype(x.dtype)
