"""GridSample, DeformConv, RoiAlign, AffineGrid and TensorScatter.

The first three have bodies of coordinates, the pixels around them (taps) and the weights of these. Their derivatives by
image and coordinates are those of the bodies. At a coordinate exactly on a pixel the derivative is that of the upper
side, and 0 at the ends of an image with padding "border" or "reflection", as in PyTorch.
"""

import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onward.build import Expr
from onward.constants import HALVES
from onward.errors import UnsupportedError
from onward.rules.common import cast_like, identity, iota, largest, rank
from onward.rules.indexing import END, along, extent, fill, filled_like, join_shape, on_axis, reshape_to
from onward.rules.registry import body, gradient
from onward.shapes import dims

INT64 = ir.DataType.INT64
CUBIC = -0.75
"""Coefficient of cubic interpolation, as in PyTorch and ONNX Runtime."""


# ---- declared shapes, so that broadcast axes are known when the graph is built ---------------------------------------


def _declare(x, *shape):
    x.value.shape = ir.Shape(shape)
    return x


def _dim(op, x, axis):
    """Return the size of an axis: a number or a symbol."""
    shape = dims(x.value)
    return _symbol(op) if shape is None else shape[axis]


def _symbol(op):
    return ir.SymbolicDim(op.names.fresh("dim"))


def _product(op, *numbers):
    return math.prod(numbers) if all(isinstance(n, int) for n in numbers) else _symbol(op)


@gradient("TensorScatter")
def tensor_scatter_gradient(op, dy, cache, update, write_indices, *, axis, mode):
    """dupdate = dY at the written elements, dcache = dY elsewhere."""
    index = _written(op, cache, update, write_indices, axis, mode)
    dcache = op.ScatterElements(dy, index, filled_like(op, update, 0), axis=axis)
    return dcache, op.GatherElements(dy, index, axis=axis)


@body("TensorScatter")
def tensor_scatter(op, cache, update, write_indices, *, axis, mode):
    """Write the update into the cache from `write_indices` on, one per sample."""
    return op.ScatterElements(cache, _written(op, cache, update, write_indices, axis, mode), update, axis=axis)


def _written(op, cache, update, write_indices, axis, mode):
    size, count = (op.Gather(op.Shape(x), np.int64(axis)) for x in (cache, update))
    indices = on_axis(op, iota(op, count), update, axis)
    if write_indices is not None:
        indices = indices + on_axis(op, write_indices, update, 0)
    if mode == "circular":
        indices = op.Mod(indices, size)
    return op.Expand(indices, op.Shape(update))


# ---- taps ------------------------------------------------------------------------------------------------------------


def _numbers(op, values, like):
    return cast_like(op, op.constant(np.asarray(values, np.float64)), like)


def _size(op, x, axis):
    """Return the size of an axis as an integer scalar."""
    shape = x.value.shape
    if shape is not None and isinstance(shape[axis], int):
        return op.constant(np.int64(shape[axis]))
    return _declare(op.Gather(op.Shape(x), np.int64(axis)))


def _as_float(op, number, like):
    return cast_like(op, op.Cast(number, to=ir.DataType.DOUBLE) if like.dtype is None else number, like)


def _clip_to_image(op, p, size):
    """Clip coordinates to the image, with derivative 0 at its ends."""
    last = size - 1
    return op.Where(p > 0, op.Where(p < last, p, last), 0)


def _exact(op, p):
    """Cast half precision to float32, in which neighboring pixels differ."""
    return op.Cast(p, to=ir.DataType.FLOAT) if p.dtype in HALVES else p


def _reflect(op, p, size, align_corners):
    """Reflect coordinates at the ends of the image: centers of pixels, or half a pixel outside."""
    low, extent = (0.0, op.Max(size - 1, 1)) if align_corners else (-0.5, size)
    distance = op.Abs(p - low)
    times = op.Floor(distance / extent)
    rest = distance - times * extent
    odd = times - 2 * op.Floor(times / 2)
    return low + rest + odd * (extent - 2 * rest)


class Taps(NamedTuple):
    """Pixels around coordinates along one axis, with their weights (None: 1), both [M, T, P]."""

    offsets: list[int]
    pixels: Expr
    weights: Expr | None


def _taps(op, p, size, mode="linear", padding="zeros", align_corners=0):
    """Return the taps of coordinates [M, P] along an axis."""
    if mode == "nearest":
        base, offsets, weights = op.Round(p), [0], None
    else:
        p = _inside(op, p, size, mode, padding, align_corners)
        base = op.Floor(p)
        offsets, weights = _weights(op, op.Unsqueeze(p - base, [1]), mode)
    pixels = op.Unsqueeze(base, [1]) + _numbers(op, np.reshape(offsets, (-1, 1)), p)
    if padding == "reflection":
        pixels = _reflect(op, pixels, size, align_corners)
    if padding == "zeros":
        within = cast_like(op, op.And(pixels >= 0, pixels < size), p)
        weights = within if weights is None else weights * within
    return Taps(offsets, op.Cast(_clip_to_image(op, pixels, size), to=INT64), weights)


def _inside(op, p, size, mode, padding, align_corners):
    """Apply the padding to coordinates. With mode "cubic", padding applies to each pixel instead."""
    if padding == "zeros" or mode == "cubic":
        return p
    if padding == "reflection":
        p = _reflect(op, p, size, align_corners)
    return _clip_to_image(op, p, size)


def _weights(op, f, mode):
    """Return the offsets of the taps from the pixel below, and their weights at `f` above it."""
    if mode == "linear":
        return [0, 1], _declare(op.Concat(1 - f, f, axis=1), f.value.shape[0], 2, f.value.shape[2])

    def far(t):
        return ((t - 5) * t + 8) * t * CUBIC - 4 * CUBIC

    def near(t):
        return ((CUBIC + 2) * t - (CUBIC + 3)) * t * t + 1

    weights = op.Concat(far(f + 1), near(f), near(1 - f), far(2 - f), axis=1)
    return [-1, 0, 1, 2], _declare(weights, f.value.shape[0], 4, f.value.shape[2])


def _sample(op, x, sizes, taps):
    """Sample images [M, C, D1 ... Dr] at taps per axis [M, T, P]: [M, C, P].

    It reads all channels of a pixel at once, which takes the fewest indices.
    """
    rank, pixels, channels = len(sizes), taps[0].pixels, _dim(op, x, 1)
    index, weights = on_axis(op, iota(op, _size(op, pixels, 0)), x, 0), None
    for axis, (size, tap) in enumerate(zip(sizes, taps, strict=True)):
        others = [1 + i for i in range(rank) if i != axis]
        index = index * size + op.Unsqueeze(tap.pixels, others)
        if tap.weights is not None:
            weight = cast_like(op, op.Unsqueeze(tap.weights, others), x)
            weights = weight if weights is None else weights * weight
    count = len(taps[0].offsets) ** rank
    images, places = pixels.value.shape[0], pixels.value.shape[2]
    planes = op.Transpose(op.Reshape(x, [0, 0, -1]), perm=[0, 2, 1])
    rows = _declare(op.Reshape(planes, op.Concat([-1], op.Shape(x, start=1, end=2), axis=0)), _symbol(op), channels)
    read = op.Gather(rows, _declare(op.Reshape(index, [0, count, -1]), images, count, places))
    read = _declare(read, images, count, places, channels)
    if weights is not None:
        read = read * _declare(op.Reshape(weights, [0, count, -1, 1]), images, count, places, 1)
    return op.Transpose(op.ReduceSum(read, [1], keepdims=0), perm=[0, 2, 1])


@body("GridSample", gradient=(0, 1))
def grid_sample(op, x, grid, *, align_corners, mode, padding_mode):
    """Return X at the coordinates of the grid: the weighted sum of the pixels around each.

    The grid has no gradient with mode "nearest", and none outside the image with mode "linear" and padding "border".
    With mode "cubic", padding applies to each pixel, as in PyTorch and ONNX Runtime; the onnx reference pads
    coordinates.
    """
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    axes = _spatial_rank(op, x, grid)
    sizes = [_size(op, x, axis + 2) for axis in range(axes)]
    images, places = _dim(op, grid, 0), _product(op, *(_dim(op, grid, axis + 1) for axis in range(axes)))
    shape = join_shape(op, extent(op, x, 0, 2), extent(op, grid, 1, axes + 1))
    grid, taps = _exact(op, grid), []
    for axis, number in enumerate(sizes):
        p = op.Reshape(op.Gather(grid, np.int64(axes - 1 - axis), axis=-1), [0, -1])
        p, size = _declare(p, images, places), _as_float(op, number, grid)
        p = (p + 1) / 2 * (size - 1) if align_corners else ((p + 1) * size - 1) / 2
        taps.append(_taps(op, p, size, mode, padding_mode, align_corners))
    return reshape_to(op, _sample(op, x, sizes, taps), shape)


def _spatial_rank(op, *tensors):
    for axes in [4 if op.opset < 20 else None, *map(rank, tensors)]:
        if axes is not None:
            return axes - 2
    raise UnsupportedError("the rank of the input of GridSample is not known", hint="give the model's inputs shapes")


@body("DeformConv", gradient=(0, 1, 2, 3, 4))
def deform_conv(op, x, w, offset, b, mask, *, dilations, group, offset_group, pads, strides):
    """Convolve X, sampled at positions moved by the offset, times the mask."""
    dilations, strides, pads = dilations or [1, 1], strides or [1, 1], pads or [0, 0, 0, 0]
    kernel, sizes, counts = ([_size(op, value, axis) for axis in (2, 3)] for value in (w, x, offset))
    dims_of_windows = [_dim(op, value, axis) for value in (w, offset) for axis in (2, 3)]
    images, places = _product(op, _dim(op, x, 0), offset_group), _product(op, *dims_of_windows)

    def shape(*sizes):
        return op.Concat(*(n if isinstance(n, list) else op.Reshape(n, [1]) for n in sizes), axis=0)

    def regular(axis):
        """Return the positions without an offset, [kernel, count] in [kH, kW, oH, oW]."""
        within = iota(op, kernel[axis]) * dilations[axis]
        begins = iota(op, counts[axis]) * strides[axis] - pads[axis]
        positions = op.Unsqueeze(within, [1]) + begins
        positions = op.Unsqueeze(positions, [1, 3] if axis == 0 else [0, 2])
        return _declare(positions, *(n if i % 2 == axis else 1 for i, n in enumerate(dims_of_windows)))

    offset, taps = _exact(op, offset), []
    moved = op.Reshape(offset, shape([-1], *kernel, [2], *counts))
    for axis, size in enumerate(sizes):
        p = _declare(op.Gather(moved, np.int64(axis), axis=3), images, *dims_of_windows)
        p = op.Reshape(p + _as_float(op, regular(axis), offset), [0, -1])
        taps.append(_taps(op, _declare(p, images, places), _as_float(op, size, offset)))
    read = _sample(op, op.Reshape(x, shape(_size(op, x, 0) * offset_group, [-1], *sizes)), sizes, taps)
    if mask is not None:
        read = read * _declare(op.Reshape(mask, shape(op.Shape(read, end=1), [1, -1])), images, 1, places)
    columns = op.Reshape(read, shape(_size(op, x, 0), [group, -1], counts[0] * counts[1]))
    weights = op.Reshape(w, shape([group, -1], op.ReduceProd(op.Shape(w, start=1), keepdims=1)))
    y = op.Reshape(op.MatMul(weights, columns), shape(_size(op, x, 0), [-1], *counts))
    filters = _dim(op, w, 0)
    y = _declare(y, _dim(op, x, 0), filters, *dims_of_windows[2:])
    return y if b is None else y + _declare(op.Reshape(b, [1, -1, 1, 1]), 1, filters, 1, 1)


@body("RoiAlign", gradient=(0, 1))
def roi_align(
    op, x, rois, batch_indices, *, coordinate_transformation_mode, mode, output_height, output_width,
    sampling_ratio, spatial_scale,
):  # fmt: skip
    """Return the mean or maximum of samples of X in each bin of a region.

    As in the standard, the maximum is over pixels times weights.
    """
    half_pixel = coordinate_transformation_mode == "half_pixel"
    sizes = [_size(op, x, axis + 2) for axis in range(2)]
    regions, channels = _dim(op, rois, 0), _dim(op, x, 1)
    rois = _exact(op, rois)

    def along(axis, bins):
        """Return two taps of each of S samples per bin: pixels, weights and a mask of the samples, [R, bins S 2].

        Also return the number of taps in a bin, and the number of samples that count, [R, 1].
        """
        begin, end = (
            _declare(op.Gather(rois, [1 - axis + side], axis=1), regions, 1) * spatial_scale for side in (0, 2)
        )
        extent = end - begin
        begin, extent = (begin - 0.5, extent) if half_pixel else (begin, op.Max(extent, op.scalar(1, rois)))
        count = _numbers(op, [[sampling_ratio]], rois) if sampling_ratio > 0 else op.Ceil(extent / bins)
        most = op.Cast(op.ReduceMax(count, keepdims=0), to=INT64)
        samples = sampling_ratio if sampling_ratio > 0 else _symbol(op)
        steps = _as_float(op, _declare(iota(op, most), samples), rois)
        within = op.Unsqueeze((steps + 0.5) / count, [1]) + _numbers(op, np.arange(bins).reshape(-1, 1), rois)
        p = op.Unsqueeze(begin, [2]) + within * op.Unsqueeze(extent / bins, [2])
        size = _as_float(op, sizes[axis], rois)
        counts = cast_like(op, op.And(p >= -1, p <= size), rois)
        p = _clip_to_image(op, p, size)
        below = op.Floor(p)
        pixels = op.Concat(*(op.Unsqueeze(n, [3]) for n in (below, op.Min(below + 1, size - 1))), axis=3)
        weights = op.Concat(*(op.Unsqueeze(n * counts, [3]) for n in (1 - (p - below), p - below)), axis=3)
        is_sample = op.Expand(op.Unsqueeze(steps < count, [1, 3]), op.Shape(weights))
        whole = _product(op, bins, samples, 2)
        taps = [_declare(op.Reshape(n, [0, -1]), regions, whole) for n in (pixels, weights, is_sample)]
        return op.Cast(taps[0], to=INT64), *taps[1:], op.Reshape(most * 2, [1]), count

    def together(rows, columns):
        return op.Unsqueeze(rows, [2]), op.Unsqueeze(columns, [1])

    rows, high, is_row, row_taps, row_count = along(0, output_height)
    columns, wide, is_column, column_taps, column_count = along(1, output_width)
    image = op.Reshape(op.Cast(batch_indices, to=INT64), [-1, 1, 1])
    row, column = together(rows, columns)
    index = (image * sizes[0] + row) * sizes[1] + column
    index = _declare(index, regions, rows.value.shape[1], columns.value.shape[1])
    flat = op.Reshape(op.Transpose(x, perm=[1, 0, 2, 3]), [0, -1])
    pixels = _declare(op.Gather(flat, index, axis=1), channels, *index.value.shape)
    weighted = pixels * cast_like(op, op.Mul(*together(high, wide)), x)
    nothing = -largest(x) if mode == "max" else 0
    weighted = op.Where(op.And(*together(is_row, is_column)), weighted, nothing)
    bins = op.Concat([0, 0, output_height], row_taps, [output_width], column_taps, axis=0)
    taps = [2 * sampling_ratio if sampling_ratio > 0 else _symbol(op) for _ in range(2)]
    weighted = op.Reshape(weighted, bins)
    weighted = _declare(weighted, channels, regions, output_height, taps[0], output_width, taps[1])
    if mode == "max":
        y = op.ReduceMax(weighted, [3, 5], keepdims=0)
    else:
        count = op.Reshape(cast_like(op, op.Max(row_count * column_count, op.scalar(1, rois)), x), [-1, 1, 1])
        y = op.ReduceSum(weighted, [3, 5], keepdims=0) / _declare(count, 1 if sampling_ratio > 0 else regions, 1, 1)
    return op.Transpose(y, perm=[1, 0, 2, 3])


@gradient("AffineGrid")
def affine_grid(op, dy, theta, size, *, align_corners):
    """Y = (P, 1) theta' for the points P of the grid of the identity: dtheta = dY' (P, 1)."""
    unit = op.Unsqueeze(identity(op, extent(op, theta, 1), theta), [0])
    one_image = op.Concat([1], op.Slice(size, [1], [END]), axis=0)
    places = op.AffineGrid(unit, one_image, align_corners=align_corners)
    axes = along(op, theta, 1)
    places = op.Reshape(places, join_shape(op, [-1], axes))
    ones = fill(op, op.Concat(op.Shape(places, end=1), [1], axis=0), 1, theta)
    rows = op.Reshape(dy, join_shape(op, [0], [-1], axes))
    return op.MatMul(op.Transpose(rows, perm=[0, 2, 1]), op.Concat(places, ones, axis=1))
