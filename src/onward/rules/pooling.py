"""Pooling and resizing."""

import numpy as np
import onnx_ir as ir

from onward.build import Expr
from onward.constants import HALVES, constant_tensor
from onward.errors import UnsupportedError
from onward.rules.common import further_output, identity, iota, largest
from onward.rules.indexing import add_at, fill, merge_axes, reshape_to, shaped_like
from onward.rules.registry import body, gradient
from onward.rules.windows import known_product, planes, reshape, size_of, sliding, spread_windows

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


@gradient("MaxPool")
def max_pool(op, dys, x, *, node, auto_pad, ceil_mode, dilations, kernel_shape, pads, storage_order, strides):
    """dX = dY at the first maximum of each window."""
    if dys[0] is None:
        return None
    if not storage_order:
        indices = further_output(op, node, 1, INT64, node.outputs[0].shape)
    else:
        attributes = {"auto_pad": auto_pad, "ceil_mode": ceil_mode, "dilations": dilations, "pads": pads}
        _, indices = op.MaxPool(x, outputs=2, kernel_shape=kernel_shape, strides=strides, **attributes)
    if _tiles(x, kernel_shape, auto_pad, dilations, pads, strides):
        return op.MaxUnpool(dys[0], indices, kernel_shape=kernel_shape, strides=strides)
    total = known_product(x, 0)
    size = [total] if total is not None else op.Reshape(op.Size(x), [1])
    return shaped_like(op, add_at(op, size, op.Reshape(indices, [-1]), op.Reshape(dys[0], [-1])), x)


def _tiles(x, kernel, auto_pad, dilations, pads, strides):
    """True if windows certainly cover each element once: then MaxUnpool is the fastest."""
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


@body("MaxRoiPool", gradient=(0,))
def max_roi_pool(op, x, rois, *, pooled_shape, spatial_scale):
    """Return X at the first maximum of each bin; an empty bin is 0."""
    rois, pixels = (op.Cast(value, to=FLOAT) if value.dtype in HALVES else value for value in (rois, x))
    images = op.Cast(op.Gather(rois, [0], axis=1), to=INT64)
    rows, columns = (_in_bins(op, x, rois, axis, pooled_shape[axis - 2], spatial_scale) for axis in (2, 3))
    pixels = op.Gather(pixels, op.Squeeze(images, [1]), axis=0)
    # First the maximum of each row in each column of bins, then the maximum of these in each bin.
    in_rows = op.Where(op.Unsqueeze(columns, [1, 3]), op.Unsqueeze(pixels, [2]), -largest(pixels))
    across, most = op.ArgMax(in_rows, axis=-1, keepdims=0), op.ReduceMax(in_rows, [-1], keepdims=0)
    in_bins = op.Where(op.Unsqueeze(rows, [1, 3]), op.Unsqueeze(most, [2]), -largest(pixels))
    down = op.ArgMax(in_bins, axis=-1)
    across = op.GatherElements(op.Expand(op.Unsqueeze(across, [2]), op.Shape(in_bins)), down, axis=-1)
    channels, height, width = (op.Shape(x, start=axis, end=axis + 1) for axis in (1, 2, 3))
    channel = images * channels + iota(op, op.Squeeze(channels, [0]))
    index = op.Unsqueeze(channel * height, [2, 3]) + op.Squeeze(down, [-1])
    index = index * width + op.Squeeze(across, [-1])
    some = op.And(op.Unsqueeze(_any(op, rows), [1, 3]), op.Unsqueeze(_any(op, columns), [1, 2]))
    return op.Where(some, op.Gather(op.Reshape(x, [-1]), index), 0)


def _in_bins(op, x, rois, axis, bins, scale):
    """Return a mask per region, bin and position along an axis of the image: True in the bin.

    As in runtimes, float32 with its rounding errors decides whether a bin reaches one position further.
    """

    def round_half_away(x):
        return op.Sign(x) * op.Floor(op.Abs(x) + 0.5)

    rois = op.Cast(rois, to=FLOAT)
    first, last = (round_half_away(op.Gather(rois, [4 - axis + side], axis=1) * scale) for side in (0, 2))
    size = op.Max(last - first + 1, np.float32(1)) / bins
    numbers = np.arange(bins, dtype=np.float32)
    begin = op.Unsqueeze(op.Floor(op.constant(numbers) * size) + first, [2])
    end = op.Unsqueeze(op.Ceil(op.constant(numbers + 1) * size) + first, [2])
    positions = op.Cast(iota(op, op.Squeeze(op.Shape(x, start=axis, end=axis + 1), [0])), to=FLOAT)
    return op.And(positions >= begin, positions < end)


def _any(op, truths):
    return op.Cast(op.ReduceMax(op.Cast(truths, to=FLOAT), [-1], keepdims=0), to=ir.DataType.BOOL)


@body("MaxUnpool", gradient=(0,))
def max_unpool(op, x, indices, output_shape, *, kernel_shape, pads, strides):
    """Return zeros with the elements of X at their indices, padded to `output_shape`."""
    rank = len(kernel_shape)
    strides, pads = list(strides or [1] * rank), np.asarray(pads or [0] * 2 * rank)
    grow = (np.asarray(kernel_shape) - pads[:rank] - pads[rank:] - strides).tolist()
    shape = op.Concat(op.Shape(x, end=2), op.Shape(x, start=2) * strides + grow, axis=0)
    zeros = fill(op, op.ReduceProd(shape, keepdims=1), 0, x)
    y = reshape_to(op, op.ScatterElements(zeros, op.Reshape(indices, [-1]), op.Reshape(x, [-1])), shape)
    if output_shape is None:
        return y
    return op.Pad(y, op.Concat([0] * (rank + 2), output_shape - shape, axis=0))


@gradient("AveragePool")
def average_pool(op, dy, x, *, y, auto_pad, count_include_pad, dilations, kernel_shape, pads, strides):
    """dX = dY / n added up over each window of n averaged elements."""
    window = sliding(op, x, y, list(kernel_shape), auto_pad=auto_pad, dilations=dilations, pads=pads, strides=strides)
    first = window.number(op, [0] * window.rank)
    last = window.sizes
    if count_include_pad:
        first = first - window.begin
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            last = window.covered - window.begin
        else:
            last = window.sizes + window.number(op, list(pads or [0] * 2 * window.rank)[window.rank :])
    return _added_up(op, dy / _counts(op, window, first, last, dy), x, window)


def _counts(op, window, first, last, like):
    """Return the number of elements of each window between `first` and `last` on all axes."""
    result = 1
    for axis in range(window.rank):
        shape = [1] * (axis + 2) + [-1] + [1] * (window.rank - axis - 1)
        if window.static:
            steps = np.arange(window.kernel[axis]) * window.dilations[axis]
            positions = np.arange(window.count[axis])[:, None] * window.strides[axis] - window.begin[axis] + steps
            inside = ((positions >= first[axis]) & (positions < last[axis])).sum(1)
            result = result * np.maximum(inside, 1).reshape(shape)
            continue
        at = np.int64(axis)
        steps = iota(op, op.Gather(window.kernel, at)) * window.dilations[axis]
        starts = iota(op, op.Gather(window.count, at)) * window.strides[axis]
        positions = op.Unsqueeze(starts - op.Gather(window.begin, at), [1]) + steps
        inside = op.And(positions >= op.Gather(first, at), positions < op.Gather(last, at))
        number = op.Max(op.ReduceSum(op.Cast(inside, to=INT64), [1], keepdims=0), np.int64(1))
        result = op.Reshape(number, shape) * result
    if isinstance(result, Expr):
        return op.CastLike(result, like)
    return result.flat[0].item() if (result == result.flat[0]).all() else op.constant(result, like.dtype)


def _added_up(op, dy, x, window):
    """Add each element of `dy` to all elements of its window."""
    if window.static:
        ones = op.constant(np.ones((1, 1, *window.kernel)), dy.dtype)
    else:
        ones = op.Expand(op.scalar(1, dy), op.Concat([1, 1], window.kernel, axis=0))
    return shaped_like(op, spread_windows(op, planes(op, dy), ones, window), x)


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
    """Return sign(x) |x|^exponent."""
    if exponent == 1:
        return x
    return op.Sign(x) if exponent == 0 else op.Sign(x) * op.Abs(x) ** exponent


def _safe_power(op, y, exponent):
    """Return y^exponent; 1 where y is 0."""
    return op.Where(op.Equal(y, 0), 1, y) ** exponent


@gradient("GlobalAveragePool")
def global_average_pool(op, dy, x):
    """dX = dY / n, everywhere."""
    count = known_product(x, 2)
    share = dy / (count if count is not None else op.CastLike(op.ReduceProd(op.Shape(x, start=2), keepdims=0), dy))
    return op.Expand(share, op.Shape(x))


@gradient("GlobalMaxPool")
def global_max_pool(op, dy, x):
    """dX = dY at the first maximum of each channel."""
    channels = merge_axes(op, x, 2)
    index = op.ArgMax(channels, axis=2, keepdims=1)
    zeros = op.Expand(op.scalar(0, dy), op.Shape(channels))
    return shaped_like(op, op.ScatterElements(zeros, index, merge_axes(op, dy, 2), axis=2), x)


# ---- resizing --------------------------------------------------------------------------------------------------------


@gradient("Resize", inputs=(0,))
def resize(
    op, dy, x, roi, scales, sizes,
    *, node, axes, coordinate_transformation_mode, keep_aspect_ratio_policy, mode, nearest_mode,
):  # fmt: skip
    """Linear along each axis: dX = M dY, where M is the resized identity matrix."""
    rank = _rank_of_resized(x, dy, axes, scales if sizes is None else sizes)
    chosen = [axis % rank for axis in axes] if axes is not None else list(range(rank))
    stretches = sizes is None or keep_aspect_ratio_policy == "stretch"
    crops = coordinate_transformation_mode == "tf_crop_and_resize"
    factors = [None] * len(chosen)
    if stretches and not crops:
        factors = _known_scales(x, dy, scales if sizes is None else None, chosen)
    repeats = mode == "nearest" and (coordinate_transformation_mode, nearest_mode) in _REPEATS
    if repeats and all(scale is not None and scale == int(scale) > 0 for scale in factors):
        return _blocks_summed(op, dy, x, dict(zip(chosen, map(int, factors), strict=True)), rank)
    attributes = {k: v for k, v in node.attributes.items() if k not in ("axes", "extrapolation_value")}
    for position, axis in enumerate(chosen):
        if factors[position] == 1:
            continue
        if stretches:
            roi_of_axis = scale = None
            if crops:
                start, end = (op.Gather(roi, [i]) for i in (position, position + len(chosen)))
                roi_of_axis = op.Concat(op.Pad(start, [3, 0], 0), op.Pad(end, [3, 0], 1), axis=0)
            if sizes is None:
                scale = op.Pad(op.Gather(scales, [position]), [3, 0], 1)
            matrix = _matrix_of_axis(op, x, dy, axis, roi_of_axis, scale, attributes)
        else:
            matrix = _matrix_of_all_axes(op, x, chosen, position, roi, sizes, attributes)
        dy = _along(op, matrix, dy, axis, rank)
    return dy


def _rank_of_resized(x, y, axes, factors):
    """Return the rank: without `axes`, the number of sizes or scales."""
    for value in (x.value, y.value):
        if value.shape is not None:
            return value.shape.rank()
    length = None if axes is not None or factors.value.shape is None else factors.value.shape[0]
    if not isinstance(length, int):
        raise UnsupportedError("the rank of the input of Resize is not known", hint="give the model's inputs shapes")
    return length


_REPEATS = {("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"), ("half_pixel", "round_prefer_ceil")}
"""Modes that repeat each element n times for an integer scale n."""


def _known_scales(x, y, scales, chosen):
    """Return the scale of each chosen axis; None if it is not known."""
    if scales is not None:
        tensor = None if scales.value.is_graph_input() else constant_tensor(scales.value)
        return [None] * len(chosen) if tensor is None else [float(n) for n in tensor.numpy()]
    if x.value.shape is None or y.value.shape is None:
        return [None] * len(chosen)
    pairs = [(x.value.shape[axis], y.value.shape[axis]) for axis in chosen]
    return [n / m if isinstance(m, int) and isinstance(n, int) and m else None for m, n in pairs]


def _blocks_summed(op, dy, x, repeats, rank):
    """Sum each block of copies of an element."""
    split, sums = [], []
    for axis in range(rank):
        split.append(size_of(op, x, axis))
        if repeats.get(axis, 1) > 1:
            sums.append(len(split))
            split.append(repeats[axis])
    return op.ReduceSum(reshape(op, dy, *split), sums, keepdims=0) if sums else dy


def _matrix_of_axis(op, x, y, axis, roi, scales, attributes):
    """Return the resizing of one axis as a matrix [before, after]: the identity as [1, before, 1, before], resized."""
    before, after = (op.Shape(value, start=axis, end=axis + 1) for value in (x, y))
    shape = op.Concat([1], before, [1], before, axis=0)
    sizes = op.Concat([1], before, [1], after, axis=0) if scales is None else None
    resized = op.Resize(op.Reshape(_identity(op, before, x), shape, allowzero=1), roi, scales, sizes, **attributes)
    return op.Squeeze(resized, [0, 2])


def _matrix_of_all_axes(op, x, chosen, position, roi, sizes, attributes):
    """Return the same matrix if the scale depends on all axes: resize an identity repeated along the others."""
    count = len(chosen)
    sizes_before = [op.Shape(x, start=axis, end=axis + 1) for axis in chosen]
    before = sizes_before[position]
    shape = [before if i == position else [1] for i in range(count)]
    rows = op.Reshape(_identity(op, before, x), op.Concat(before, [1], *shape, axis=0))
    whole = op.Expand(rows, op.Concat(before, [1], *sizes_before, axis=0))
    resized = op.Resize(whole, roi, None, sizes, **attributes, axes=list(range(2, count + 2)))
    others = [1, *(axis + 2 for axis in range(count) if axis != position)]
    return op.Squeeze(op.Slice(resized, [0] * count, [1] * count, others), others)


def _identity(op, size, like):
    return identity(op, op.Concat(size, size, axis=0), like)


def _along(op, matrix, dy, axis, rank):
    """Multiply `dy` along `axis` by the matrix."""
    if axis == rank - 2:
        return op.MatMul(matrix, dy)
    if axis == rank - 1:
        return op.MatMul(dy, op.Transpose(matrix))
    swap = list(range(rank))
    swap[axis], swap[-1] = swap[-1], swap[axis]
    return op.Transpose(op.MatMul(op.Transpose(dy, perm=swap), op.Transpose(matrix)), perm=swap)
