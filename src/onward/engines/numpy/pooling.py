"""Pools."""

from __future__ import annotations

import dataclasses

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.precision import in_float32, lowest
from onward.engines.numpy.windows import halves, windows

operators = Operators()


@operators.define("MaxPool")
@in_float32
def max_pool(x, *, auto_pad, ceil_mode, dilations, kernel_shape, outputs, pads, storage_order, strides):
    sizes = x.shape[2:]
    where = windows(
        sizes, kernel_shape, auto_pad=auto_pad, ceil_mode=ceil_mode, dilations=dilations, pads=pads, strides=strides
    )
    values = _flat(where.of(x, lowest(x.dtype)), len(sizes))
    if outputs == 1:
        return values.max(-1)
    numbers = np.arange(x.size).reshape(x.shape[:2] + sizes[:: -1 if storage_order else 1])
    if storage_order:  # within a plane by columns
        numbers = numbers.transpose(0, 1, *range(x.ndim - 1, 1, -1))
    best = values.argmax(-1)[..., None]
    y = np.take_along_axis(values, best, -1)[..., 0]
    return y, np.take_along_axis(_flat(where.of(numbers), len(sizes)), best, -1)[..., 0]


@operators.define("AveragePool")
@in_float32
def average_pool(x, *, auto_pad, ceil_mode, count_include_pad, dilations, kernel_shape, pads, strides):
    sizes, rank = x.shape[2:], x.ndim - 2
    where = windows(
        sizes, kernel_shape, auto_pad=auto_pad, ceil_mode=ceil_mode, dilations=dilations, pads=pads, strides=strides
    )
    sums = _flat(where.of(x), rank).sum(-1)
    if count_include_pad:  # but not what hangs over the padding
        ends = halves(pads, rank)[1]
        padded = [b + n + e for b, n, e in zip(where.begins, sizes, ends, strict=True)]
        sizes = where.covered if auto_pad.startswith("SAME") else padded
        where = dataclasses.replace(where, begins=[0] * rank)
    return sums / _flat(where.of(np.ones(sizes, x.dtype)), rank).sum(-1)


@operators.define("LpPool")
@in_float32
def lp_pool(x, *, auto_pad, ceil_mode, dilations, kernel_shape, p, pads, strides):
    where = windows(
        x.shape[2:],
        kernel_shape,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        dilations=dilations,
        pads=pads,
        strides=strides,
    )
    return (_flat(where.of(np.abs(x)), x.ndim - 2) ** p).sum(-1) ** (1 / p)


@operators.define("GlobalMaxPool")
def global_max_pool(x):
    return x.max(_spatial(x), keepdims=True)


@operators.define("GlobalAveragePool")
@in_float32
def global_average_pool(x):
    return x.mean(_spatial(x), keepdims=True)


@operators.define("GlobalLpPool")
@in_float32
def global_lp_pool(x, *, p):
    return (np.abs(x) ** p).sum(_spatial(x), keepdims=True) ** (1 / p)


@operators.define("MaxUnpool")
def max_unpool(x, places, shape=None, *, kernel_shape, pads, strides):
    rank = x.ndim - 2
    begins, ends = halves(pads, rank)
    usual = [
        (n - 1) * s + k - begin - end
        for n, s, k, begin, end in zip(x.shape[2:], strides or [1] * rank, kernel_shape, begins, ends, strict=True)
    ]
    result = np.zeros((*x.shape[:2], *usual), x.dtype)
    result.put(places, x)
    if shape is None:
        return result
    larger = np.zeros(shape.tolist(), x.dtype)
    larger[tuple(map(slice, result.shape))] = result
    return larger


@operators.define("MaxRoiPool")
def max_roi_pool(x, rois, *, pooled_shape, spatial_scale):
    result = np.zeros((len(rois), x.shape[1], *pooled_shape), x.dtype)
    scaled = rois[:, 1:] * spatial_scale
    corners = np.trunc(scaled + np.copysign(0.5, scaled)).astype(int)  # halves away from zero
    for n, (batch, (left, top, right, bottom)) in enumerate(zip(rois[:, 0].astype(int), corners, strict=True)):
        rows = _bins(top, bottom, pooled_shape[0], x.shape[2])
        columns = _bins(left, right, pooled_shape[1], x.shape[3])
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                part = x[batch, :, row, column]
                if part.size:
                    result[n, :, i, j] = part.max((1, 2))
    return result


def _bins(first, last, count, size):
    """A stretch in so many parts, of which neighbours may share an element."""
    step = max(last - first + 1, 1) / count
    edges = ((first + int(np.floor(i * step)), first + int(np.ceil((i + 1) * step))) for i in range(count))
    return [slice(max(begin, 0), min(max(end, 0), size)) for begin, end in edges]


def _flat(view, rank):
    """Windows [..., *kernel] with the elements of each on one axis."""
    return view.reshape(*view.shape[:-rank], -1)


def _spatial(x):
    return tuple(range(2, x.ndim))
