"""Convolutions, pools, and values between the elements of a grid."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch.nn import functional as F

from onward.engines.framework import Operators
from onward.engines.shared.arrays import add_bias
from onward.engines.shared.spatial import as_resize, count_elements, place_windows, sum_windows
from onward.engines.shared.windows import cut_off, paddings

operators = Operators()

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def pad(x, amounts, value=0.0):
    """Pad spatial axes by (before, after). Negative amounts crop."""
    flat = [amount for pair in reversed(amounts) for amount in pair]
    return F.pad(x, flat, value=value) if any(flat) else x


@operators.define("Conv")
def conv(x, w, b=None, *, auto_pad, dilations, group, kernel_shape, pads, strides):
    rank = x.ndim - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    amounts = paddings(auto_pad, pads, x.shape[2:], w.shape[2:], strides, dilations)
    if all(before == after for before, after in amounts):
        before = [before for before, _ in amounts]
    else:
        x, before = pad(x, amounts), [0] * rank
    if rank == 2:  # this layout has the faster kernels
        x, w = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, w))
    return _CONVOLUTIONS[rank](x, w, b, strides, before, dilations, group)


@operators.define("ConvTranspose")
def conv_transpose(
    x, w, b=None, *, auto_pad, dilations, group, kernel_shape, output_padding, output_shape, pads, strides
):
    rank = x.ndim - 2
    strides, dilations, more = strides or [1] * rank, dilations or [1] * rank, output_padding or [0] * rank
    amounts = cut_off(auto_pad, pads, x.shape[2:], w.shape[2:], strides, dilations, more, output_shape)
    fits = all(before == after >= 0 for before, after in amounts)
    if fits and all(m < s for m, s in zip(more, strides, strict=True)):
        before = [before for before, _ in amounts]
        return _TRANSPOSED[rank](x, w, b, strides, before, more, group, dilations)
    y = _TRANSPOSED[rank](x, w, None, strides, 0, 0, group, dilations)
    return add_bias(pad(y, [(-before, m - after) for (before, after), m in zip(amounts, more, strict=True)]), b)


# ---- pools -----------------------------------------------------------------------------------------------------------

_MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _takes(amounts, kernel):
    """True if PyTorch's pools take this padding."""
    return all(before == after <= size // 2 for (before, after), size in zip(amounts, kernel, strict=True))


@operators.define("MaxPool")
def max_pool(x, *, auto_pad, ceil_mode, dilations, kernel_shape, pads, storage_order, strides, outputs):
    _, strides, dilations, _, amounts = place_windows(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    pool, y = _MAX_POOLS[len(kernel_shape)], x if x.is_floating_point() else x.float()
    before = [before for before, _ in amounts]
    if not _takes(amounts, kernel_shape):
        y, before = pad(y, amounts, -torch.inf), [0] * len(kernel_shape)
    if outputs == 1:
        return pool(y, kernel_shape, strides, before, dilations).to(x.dtype)
    sizes = y.shape[2:]
    y, indices = pool(y, kernel_shape, strides, before, dilations, return_indices=True)
    shifts = [begin if size > old else 0 for (begin, _), size, old in zip(amounts, sizes, x.shape[2:], strict=True)]
    return y.to(x.dtype), _flat_indices(indices, sizes, shifts, x.shape, storage_order)


def _flat_indices(indices, sizes, shifts, shape, storage_order):
    """Convert indices in padded images of `sizes` to flat indices in the tensor without padding."""
    positions = []
    for size, shift in zip(reversed(sizes), reversed(shifts), strict=True):
        positions.insert(0, indices % size - shift)
        indices = indices // size
    order = list(range(len(positions)))
    if storage_order:  # the last axis is the slowest
        order.reverse()
    flat = functools.reduce(lambda sum, i: sum * shape[2 + i] + positions[i], order, torch.zeros_like(indices))
    planes = torch.arange(shape[0] * shape[1], device=indices.device).reshape(*shape[:2], *[1] * len(sizes))
    return flat + planes * math.prod(shape[2:])


@operators.define("AveragePool")
def average_pool(x, *, auto_pad, ceil_mode, count_include_pad, dilations, kernel_shape, pads, strides):
    windows = place_windows(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    if set(windows.dilations) == {1} and windows.added == windows.asked and _takes(windows.added, kernel_shape):
        before = [before for before, _ in windows.added]
        pool = _AVERAGE_POOLS[len(kernel_shape)]
        return pool(x, kernel_shape, windows.strides, before, count_include_pad=bool(count_include_pad))
    return sum_windows(x, windows) / torch.from_numpy(count_elements(x, windows, count_include_pad)).to(x)


def _globally(function):
    def pool(x, **attributes):
        return function(x.flatten(2), **attributes).reshape(*x.shape[:2], *[1] * (x.ndim - 2))

    return functools.wraps(function)(pool)


operators(
    GlobalMaxPool=_globally(lambda x: x.max(2).values),
    GlobalAveragePool=_globally(lambda x: x.mean(2)),
    GlobalLpPool=_globally(lambda x, *, p: torch.linalg.vector_norm(x, p, 2)),
)


# ---- grids -----------------------------------------------------------------------------------------------------------


@operators.define("Resize")
@as_resize
def resize(x, along, extrapolation_value, mode):
    y = x if x.is_floating_point() or mode == "nearest" else x.float()
    for axis, matrix, outside, picks in along:
        y = _pick(y, matrix.argmax(1), axis) if picks else _weigh(y, matrix, axis)
        if outside.any():
            beyond = torch.from_numpy(outside).to(x.device).reshape([-1 if i == axis else 1 for i in range(y.ndim)])
            y = torch.where(beyond, extrapolation_value, y)
    return y if x.dtype == y.dtype else y.round().to(x.dtype)


def _pick(x, indices, axis):
    return x.index_select(axis, torch.from_numpy(indices).to(x.device))


def _weigh(x, matrix, axis):
    """Return the matmul with a matrix whose rows have few nonzero elements."""
    count = (matrix != 0).sum(1).max()
    columns = np.argsort(matrix == 0, axis=1, kind="stable")[:, :count]
    weights = torch.from_numpy(np.take_along_axis(matrix, columns, 1)).to(x)
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    return sum(_pick(x, columns[:, i], axis) * weights[:, i].reshape(shape) for i in range(count))


_MODES = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}


@operators.define("GridSample")
def grid_sample(x, grid, *, align_corners, mode, padding_mode):
    return F.grid_sample(x, grid, _MODES[mode], padding_mode, bool(align_corners))


operators(AffineGrid=lambda theta, size, *, align_corners: F.affine_grid(theta, size.tolist(), bool(align_corners)))
