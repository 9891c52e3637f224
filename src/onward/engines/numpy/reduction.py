"""Operators that make one number of many, along axes."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.precision import highest, in_float32, is_float, lowest, widened

operators = Operators()


@operators.define("ReduceSum")
@in_float32
def reduce_sum(x, axes=None, *, keepdims, noop_with_empty_axes):
    return np.sum(x, _axes(axes, noop_with_empty_axes), x.dtype, keepdims=bool(keepdims))


@operators.define("ReduceMean")
@in_float32
def reduce_mean(x, axes=None, *, keepdims, noop_with_empty_axes):
    return np.mean(x, _axes(axes, noop_with_empty_axes), keepdims=bool(keepdims)).astype(x.dtype, copy=False)


@operators.define("ReduceMax")
@in_float32
def reduce_max(x, axes=None, *, keepdims, noop_with_empty_axes):
    return np.max(x, _axes(axes, noop_with_empty_axes), keepdims=bool(keepdims), initial=lowest(x.dtype))


@operators.define("ReduceMin")
@in_float32
def reduce_min(x, axes=None, *, keepdims, noop_with_empty_axes):
    return np.min(x, _axes(axes, noop_with_empty_axes), keepdims=bool(keepdims), initial=highest(x.dtype))


@operators.define("ReduceProd")
@in_float32
def reduce_prod(x, axes=None, *, keepdims, noop_with_empty_axes):
    return np.prod(x, _axes(axes, noop_with_empty_axes), x.dtype, keepdims=bool(keepdims))


@operators.define("ReduceL1")
@in_float32
def reduce_l1(x, axes=None, *, keepdims, noop_with_empty_axes):
    return reduce_sum(np.abs(x), axes, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes)


@operators.define("ReduceL2")
@in_float32
def reduce_l2(x, axes=None, *, keepdims, noop_with_empty_axes):
    squares = reduce_sum(np.square(x), axes, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes)
    return np.sqrt(squares).astype(x.dtype, copy=False)


@operators.define("ReduceLogSum")
@in_float32
def reduce_log_sum(x, axes=None, *, keepdims, noop_with_empty_axes):
    total = reduce_sum(x, axes, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes)
    return np.log(total).astype(x.dtype, copy=False)


@operators.define("ReduceLogSumExp")
@in_float32
def reduce_log_sum_exp(x, axes=None, *, keepdims, noop_with_empty_axes):
    along = _axes(axes, noop_with_empty_axes)
    y = x if is_float(x.dtype) else x.astype(np.float64)
    top = np.max(y, along, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)  # infinities less themselves would be NaN
    result = np.log(np.sum(np.exp(y - top), along, keepdims=True)) + top
    return (result if keepdims else np.squeeze(result, along)).astype(x.dtype, copy=False)


@operators.define("ReduceSumSquare")
@in_float32
def reduce_sum_square(x, axes=None, *, keepdims, noop_with_empty_axes):
    return reduce_sum(np.square(x), axes, keepdims=keepdims, noop_with_empty_axes=noop_with_empty_axes)


@operators.define("ArgMax")
def arg_max(x, *, axis, keepdims, select_last_index):
    return _place(np.argmax, widened(x), axis, keepdims, select_last_index)


@operators.define("ArgMin")
def arg_min(x, *, axis, keepdims, select_last_index):
    return _place(np.argmin, widened(x), axis, keepdims, select_last_index)


@operators.define("CumSum")
@in_float32
def cum_sum(x, axis, *, exclusive, reverse):
    return _cumulated(np.cumsum, 0, x, axis.item(), exclusive, reverse)


@operators.define("CumProd")
@in_float32
def cum_prod(x, axis, *, exclusive, reverse):
    return _cumulated(np.cumprod, 1, x, axis.item(), exclusive, reverse)


@operators.define("TopK")
def top_k(x, k, *, axis, largest, sorted):
    """Sorted in any case; of what is equal, the first comes first."""
    keys = widened(x)
    if largest:
        order = x.shape[axis] - 1 - np.flip(np.argsort(np.flip(keys, axis), axis, kind="stable"), axis)
    else:
        order = np.argsort(keys, axis, kind="stable")
    order = order.take(range(k.item()), axis)
    return np.take_along_axis(x, order, axis), order


def _axes(axes, noop_with_empty_axes):
    """None are all of them."""
    if axes is None or not axes.size:
        return () if noop_with_empty_axes else None
    return tuple(axes.tolist())


def _place(function, x, axis, keepdims, last):
    if not last:
        return function(x, axis, keepdims=bool(keepdims))
    return x.shape[axis] - 1 - function(np.flip(x, axis), axis, keepdims=bool(keepdims))


def _cumulated(function, start, x, axis, exclusive, reverse):
    x = np.flip(x, axis) if reverse else x
    if exclusive:
        before = np.moveaxis(np.full_like(x, start), axis, 0)
        before[1:] = np.moveaxis(x, axis, 0)[:-1]
        x = np.moveaxis(before, 0, axis)
    y = function(x, axis, x.dtype)
    return np.flip(y, axis) if reverse else y
