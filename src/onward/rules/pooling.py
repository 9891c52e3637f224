"""Pooling, and resizing."""

import numpy as np
import onnx_ir as ir

from onward.build import Expr
from onward.constants import HALVES, constant_tensor
from onward.errors import UnsupportedError
from onward.rules.common import further_output, identity, largest
from onward.rules.indexing import fill, merge_axes, reshape_to
from onward.rules.registry import body, gradient
from onward.rules.windows import known_product, reshape, reshape_like, size_of, sliding, spatial, spread_windows

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


@gradient("MaxPool")
def max_pool(op, dys, x, *, node, auto_pad, ceil_mode, dilations, kernel_shape, pads, storage_order, strides):
    """dX = dY at the place of each maximum, the first one in a window that has several."""
    if dys[0] is None:
        return None
    if not storage_order:
        places = further_output(op, node, 1, ir.DataType.INT64, node.outputs[0].shape)
    else:
        attributes = {"auto_pad": auto_pad, "ceil_mode": ceil_mode, "dilations": dilations, "pads": pads}
        _, places = op.MaxPool(x, outputs=2, kernel_shape=kernel_shape, strides=strides, **attributes)
    if _tiles(x, kernel_shape, auto_pad, dilations, pads, strides):
        return op.MaxUnpool(dys[0], places, kernel_shape=kernel_shape, strides=strides)
    return _scatter_add(op, dys[0], places, x)


def _tiles(x, kernel, auto_pad, dilations, pads, strides):
    """Whether windows are known to cover each element once, where MaxUnpool, which is the fastest then, runs."""
    sizes = x.value.shape[2:] if x.value.shape is not None else []
    return (
        x.dtype == FLOAT
        and auto_pad == "NOTSET"
        and list(strides or []) == list(kernel)
        and not any(pads or [])
        and set(dilations or [1]) == {1}
        and len(sizes) == len(kernel)
        and all(isinstance(n, int) and n % k == 0 for n, k in zip(sizes, kernel, strict=True))
    )


def _scatter_add(op, dy, places, x):
    """Add the elements of `dy` up at `places`, numbers of elements of `x`."""
    narrow = x.dtype in HALVES
    dy = op.Cast(dy, to=FLOAT) if narrow else dy
    total = known_product(x, 0)
    size = [total] if total is not None else op.Reshape(op.Size(x), [1])
    zeros = op.Expand(op.scalar(0, dy), size)
    flat = op.ScatterElements(zeros, op.Reshape(places, [-1]), op.Reshape(dy, [-1]), axis=0, reduction="add")
    return reshape_like(op, op.Cast(flat, to=x.dtype) if narrow else flat, x)


@body("MaxRoiPool", gradient=(0,))
def max_roi_pool(op, x, rois, *, pooled_shape, spatial_scale):
    """X at the place of the maximum of each bin, the first one in a bin that has several. An empty bin is 0."""
    rois, pixels = (op.Cast(value, to=FLOAT) if value.dtype in HALVES else value for value in (rois, x))
    images = op.Cast(op.Gather(rois, [0], axis=1), to=INT64)
    rows, columns = (
        _in_bins(op, x, rois, axis, bins, spatial_scale) for axis, bins in zip((2, 3), pooled_shape, strict=True)
    )
    pixels = op.Gather(pixels, op.Squeeze(images, [1]), axis=0)
    # First the largest pixel of each row in each column of bins, then the largest of these in each bin.
    in_rows = op.Where(op.Unsqueeze(columns, [1, 3]), op.Unsqueeze(pixels, [2]), -largest(pixels))
    across, most = op.ArgMax(in_rows, axis=-1, keepdims=0), op.ReduceMax(in_rows, [-1], keepdims=0)
    in_bins = op.Where(op.Unsqueeze(rows, [1, 3]), op.Unsqueeze(most, [2]), -largest(pixels))
    down = op.ArgMax(in_bins, axis=-1)
    across = op.GatherElements(op.Expand(op.Unsqueeze(across, [2]), op.Shape(in_bins)), down, axis=-1)
    channels, height, width = (op.Shape(x, start=axis, end=axis + 1) for axis in (1, 2, 3))
    planes = images * channels + op.Range(np.int64(0), op.Squeeze(channels, [0]), np.int64(1))
    places = op.Unsqueeze(planes * height, [2, 3]) + op.Squeeze(down, [-1])
    places = places * width + op.Squeeze(across, [-1])
    some = op.And(op.Unsqueeze(_any(op, rows), [1, 3]), op.Unsqueeze(_any(op, columns), [1, 2]))
    return op.Where(some, op.Gather(op.Reshape(x, [-1]), places), 0)


def _in_bins(op, x, rois, axis, bins, scale):
    """Per region, bin and position along the axis of the image: whether the position is in the bin.

    Computed in float32, as runtimes do: with rounding errors a bin may reach one position further.
    """
    rois = op.Cast(rois, to=FLOAT)
    first, last = (_round_half_away(op, op.Gather(rois, [4 - axis + side], axis=1) * scale) for side in (0, 2))
    size = op.Max(last - first + 1, np.float32(1)) / bins
    numbers = np.arange(bins, dtype=np.float32)
    begin = op.Unsqueeze(op.Floor(op.constant(numbers) * size) + first, [2])
    end = op.Unsqueeze(op.Ceil(op.constant(numbers + 1) * size) + first, [2])
    positions = op.Range(np.int64(0), op.Squeeze(op.Shape(x, start=axis, end=axis + 1), [0]), np.int64(1))
    positions = op.Cast(positions, to=FLOAT)
    return op.And(positions >= begin, positions < end)


def _round_half_away(op, x):
    """To the nearest integer, halves away from zero."""
    return op.Sign(x) * op.Floor(op.Abs(x) + 0.5)


def _any(op, truths):
    """Whether one along the last axis is true."""
    return op.Cast(op.ReduceMax(op.Cast(truths, to=FLOAT), [-1], keepdims=0), to=ir.DataType.BOOL)


@body("MaxUnpool", gradient=(0,))
def max_unpool(op, x, places, output_shape, *, kernel_shape, pads, strides):
    """Zeros, but for each element of X at its place: of an image that is larger if `output_shape` says so."""
    rank = len(kernel_shape)
    strides, pads = list(strides or [1] * rank), np.asarray(pads or [0] * 2 * rank)
    grow = (np.asarray(kernel_shape) - pads[:rank] - pads[rank:] - strides).tolist()
    shape = op.Concat(op.Shape(x, end=2), op.Shape(x, start=2) * strides + grow, axis=0)
    zeros = fill(op, op.ReduceProd(shape, keepdims=1), 0, x)
    y = reshape_to(op, op.ScatterElements(zeros, op.Reshape(places, [-1]), op.Reshape(x, [-1])), shape)
    if output_shape is None:
        return y
    return op.Pad(y, op.Concat([0] * (rank + 2), output_shape - shape, axis=0))


@gradient("AveragePool")
def average_pool(op, dy, x, *, y, auto_pad, count_include_pad, dilations, kernel_shape, pads, strides):
    """dX = dY / n added up over each window, n the number of elements that were averaged."""
    window = sliding(op, x, y, list(kernel_shape), auto_pad=auto_pad, dilations=dilations, pads=pads, strides=strides)
    rank = window.rank
    if not count_include_pad:
        first, last = window.number(op, [0] * rank), window.sizes
    elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        first, last = window.number(op, [0] * rank) - window.begin, window.covered - window.begin
    else:
        first = window.number(op, [0] * rank) - window.begin
        last = window.sizes + window.number(op, list(pads or [0] * 2 * rank)[rank:])
    return _added_up(op, dy / _counts(op, window, first, last, dy), x, window)


def _counts(op, window, first, last, like):
    """How many elements of each window lie between `first` and `last` on every axis."""
    result = 1
    for axis in range(window.rank):
        steps = np.arange(window.kernel[axis]) * window.dilations[axis] if window.static else None
        shape = [1] * (axis + 2) + [-1] + [1] * (window.rank - axis - 1)
        if steps is not None:
            places = np.arange(window.count[axis])[:, None] * window.strides[axis] - window.begin[axis] + steps
            inside = ((places >= first[axis]) & (places < last[axis])).sum(1)
            result = result * np.maximum(inside, 1).reshape(shape)
            continue
        at = np.int64(axis)
        steps = op.Range(np.int64(0), op.Gather(window.kernel, at), np.int64(1)) * window.dilations[axis]
        starts = op.Range(np.int64(0), op.Gather(window.count, at), np.int64(1)) * window.strides[axis]
        places = op.Unsqueeze(starts - op.Gather(window.begin, at), [1]) + steps
        inside = op.And(places >= op.Gather(first, at), places < op.Gather(last, at))
        number = op.Max(op.ReduceSum(op.Cast(inside, to=INT64), [1], keepdims=0), np.int64(1))
        result = op.Reshape(number, shape) * result
    if isinstance(result, Expr):
        return op.CastLike(result, like)
    return result.flat[0].item() if (result == result.flat[0]).all() else op.constant(result, like.dtype)


def _added_up(op, dy, x, window):
    """Each element of `dy` added to all elements of its window."""
    sizes = spatial(op, dy)
    planes = op.Reshape(dy, op.Concat([-1, 1], sizes, axis=0) if isinstance(sizes, Expr) else [-1, 1, *sizes])
    kernel = window.kernel.tolist() if window.static else op.Concat([1, 1], window.kernel, axis=0)
    ones = op.Expand(op.scalar(1, dy), kernel) if isinstance(kernel, Expr) else np.ones((1, 1, *kernel))
    ones = ones if isinstance(ones, Expr) else op.constant(ones, dy.dtype)
    return reshape_like(op, spread_windows(op, planes, ones, window), x)


@gradient("LpPool")
def lp_pool(op, dy, x, *, y, auto_pad, dilations, kernel_shape, p, pads, strides):
    """dX = sign(X) |X|^(p-1) (dY Y^(1-p) added up over each window); 0 where Y is 0."""
    window = sliding(op, x, y, list(kernel_shape), auto_pad=auto_pad, dilations=dilations, pads=pads, strides=strides)
    return _power(op, x, p - 1) * _added_up(op, dy * _safe_power(op, y, 1 - p), x, window)


@gradient("GlobalLpPool")
def global_lp_pool(op, dy, x, *, y, p):
    """dX = sign(X) |X|^(p-1) dY Y^(1-p); 0 where Y is 0."""
    return _power(op, x, p - 1) * (dy * _safe_power(op, y, 1 - p))


def _power(op, x, exponent):
    """sign(x) |x|^exponent."""
    if exponent == 1:
        return x
    return op.Sign(x) if exponent == 0 else op.Sign(x) * op.Abs(x) ** exponent


def _safe_power(op, y, exponent):
    """y^exponent, where y is 0 any finite number."""
    return op.Where(op.Equal(y, 0), 1, y) ** exponent


@gradient("GlobalAveragePool")
def global_average_pool(op, dy, x):
    """dX = dY / n, everywhere."""
    count = known_product(x, 2)
    share = dy / (count if count is not None else op.CastLike(op.ReduceProd(op.Shape(x, start=2), keepdims=0), dy))
    return op.Expand(share, op.Shape(x))


@gradient("GlobalMaxPool")
def global_max_pool(op, dy, x):
    """dX = dY at the maximum of each plane, the first one if there are several."""
    planes = merge_axes(op, x, 2)
    place = op.ArgMax(planes, axis=2, keepdims=1)
    zeros = op.Expand(op.scalar(0, dy), op.Shape(planes))
    return reshape_like(op, op.ScatterElements(zeros, place, merge_axes(op, dy, 2), axis=2), x)


# ---- resizing --------------------------------------------------------------------------------------------------------


@gradient("Resize", inputs=(0,))
def resize(
    op, dy, x, roi, scales, sizes,
    *, node, axes, coordinate_transformation_mode, keep_aspect_ratio_policy, mode, nearest_mode,
):  # fmt: skip
    """Linear along each axis: dX = M dY, where the rows of M are what becomes of the rows of the identity."""
    rank = _rank_of_resized(x, dy, axes, scales if sizes is None else sizes)
    chosen = [axis % rank for axis in axes] if axes is not None else list(range(rank))
    stretches = sizes is None or keep_aspect_ratio_policy == "stretch"
    crops = coordinate_transformation_mode == "tf_crop_and_resize"
    known = [None] * len(chosen)
    if stretches and not crops:
        known = _known_scales(x, dy, scales if sizes is None else None, chosen)
    repeats = mode == "nearest" and (coordinate_transformation_mode, nearest_mode) in _REPEATS
    if repeats and all(scale is not None and scale == int(scale) > 0 for scale in known):
        return _blocks_summed(op, dy, x, dict(zip(chosen, map(int, known), strict=True)), rank)
    attributes = {k: v for k, v in node.attributes.items() if k not in ("axes", "extrapolation_value")}
    for position, axis in enumerate(chosen):
        if known[position] == 1:
            continue
        if stretches:
            cropped = _part_of_roi(op, roi, position, len(chosen)) if crops else None
            scale = op.Pad(op.Gather(scales, [position]), [3, 0], 1) if sizes is None else None
            matrix = _matrix_of_axis(op, x, dy, axis, cropped, scale, attributes)
        else:
            matrix = _matrix_of_whole(op, x, chosen, position, roi, sizes, attributes)
        dy = _along(op, matrix, dy, axis, rank)
    return dy


def _rank_of_resized(x, y, axes, factors):
    """How many axes there are: without `axes`, as many as sizes or scales."""
    for value in (x.value, y.value):
        if value.shape is not None:
            return value.shape.rank()
    length = None if axes is not None or factors.value.shape is None else factors.value.shape[0]
    if not isinstance(length, int):
        raise UnsupportedError(
            "the rank of the input of Resize is not known", hint="run shape inference first, or state its shape"
        )
    return length


_REPEATS = {("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"), ("half_pixel", "round_prefer_ceil")}
"""How nearest neighbours are found where scaling by a whole number repeats each element as often."""


def _known_scales(x, y, scales, chosen):
    """The scale of each chosen axis, None where it is not known."""
    if scales is not None:
        return _constant_floats(scales.value) or [None] * len(chosen)
    if x.value.shape is None or y.value.shape is None:
        return [None] * len(chosen)
    pairs = [(x.value.shape[axis], y.value.shape[axis]) for axis in chosen]
    return [n / m if isinstance(m, int) and isinstance(n, int) and m else None for m, n in pairs]


def _constant_floats(value):
    tensor = constant_tensor(value) if not value.is_graph_input() else None
    return None if tensor is None else [float(n) for n in tensor.numpy()]


def _blocks_summed(op, dy, x, repeats, rank):
    """The sum of each block of elements that are copies of one."""
    split, sums = [], []
    for axis in range(rank):
        split.append(size_of(op, x, axis))
        if repeats.get(axis, 1) > 1:
            sums.append(len(split))
            split.append(repeats[axis])
    return op.ReduceSum(reshape(op, dy, *split), sums, keepdims=0) if sums else dy


def _part_of_roi(op, roi, position, count):
    """The region of one axis, that of the last of four."""
    start, end = (op.Gather(roi, [place]) for place in (position, position + count))
    return op.Concat(op.Pad(start, [3, 0], 0), op.Pad(end, [3, 0], 1), axis=0)


def _matrix_of_axis(op, x, y, axis, roi, scales, attributes):
    """What resizing along one axis does, [before, after]: it is the last axis of [1, before, 1, before]."""
    before, after = (op.Shape(value, start=axis, end=axis + 1) for value in (x, y))
    shape = op.Concat([1], before, [1], before, axis=0)
    sizes = op.Concat([1], before, [1], after, axis=0) if scales is None else None
    resized = op.Resize(op.Reshape(_identity(op, before, x), shape, allowzero=1), roi, scales, sizes, **attributes)
    return op.Squeeze(resized, [0, 2])


def _matrix_of_whole(op, x, chosen, position, roi, sizes, attributes):
    """The same where the scale depends on all axes: an identity along one, which is the same along all others."""
    count = len(chosen)
    every = [op.Shape(x, start=axis, end=axis + 1) for axis in chosen]
    before = every[position]
    shape = [before if i == position else [1] for i in range(count)]
    rows = op.Reshape(_identity(op, before, x), op.Concat(before, [1], *shape, axis=0))
    whole = op.Expand(rows, op.Concat(before, [1], *every, axis=0))
    resized = op.Resize(whole, roi, None, sizes, **attributes, axes=list(range(2, count + 2)))
    others = [1, *(axis + 2 for axis in range(count) if axis != position)]
    return op.Squeeze(op.Slice(resized, [0] * count, [1] * count, others), others)


def _identity(op, size, like):
    return identity(op, op.Concat(size, size, axis=0), like)


def _along(op, matrix, dy, axis, rank):
    """Multiply each line of `dy` along `axis` by the matrix."""
    if axis == rank - 2:
        return op.MatMul(matrix, dy)
    if axis == rank - 1:
        return op.MatMul(dy, op.Transpose(matrix))
    swap = list(range(rank))
    swap[axis], swap[-1] = swap[-1], swap[axis]
    return op.Transpose(op.MatMul(op.Transpose(dy, perm=swap), op.Transpose(matrix)), perm=swap)
