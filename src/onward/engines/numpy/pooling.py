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


def _flat(view, rank):
    """Windows [..., *kernel] with the elements of each on one axis."""
    return view.reshape(*view.shape[:-rank], -1)


def _spatial(x):
    return tuple(range(2, x.ndim))
