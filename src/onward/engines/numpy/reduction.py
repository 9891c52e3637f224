"""Operators that make one number of many, along axes."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.precision import highest, in_float32, is_float, lowest, widen

operators = Operators()


def _reduction(function):
    """The row of a function of an array, axes (None: all of them), and whether these are kept."""

    @in_float32
    def reduce(x, axes=None, *, keepdims, noop_with_empty_axes):
        along = (() if noop_with_empty_axes else None) if axes is None or not axes.size else tuple(axes.tolist())
        return function(x, along, keepdims=bool(keepdims)).astype(x.dtype, copy=False)

    return reduce


def _sum(x, axes, keepdims):
    return np.sum(x, axes, x.dtype, keepdims=keepdims)


def _log_sum_exp(x, axes, keepdims):
    y = x if is_float(x.dtype) else x.astype(np.float64)
    top = np.max(y, axes, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)  # infinities less themselves would be NaN
    result = np.log(np.sum(np.exp(y - top), axes, keepdims=True)) + top
    return result if keepdims else np.squeeze(result, axes)


operators(
    ReduceSum=_reduction(_sum),
    ReduceMean=_reduction(np.mean),
    ReduceMax=_reduction(lambda x, axes, keepdims: np.max(x, axes, keepdims=keepdims, initial=lowest(x.dtype))),
    ReduceMin=_reduction(lambda x, axes, keepdims: np.min(x, axes, keepdims=keepdims, initial=highest(x.dtype))),
    ReduceProd=_reduction(lambda x, axes, keepdims: np.prod(x, axes, x.dtype, keepdims=keepdims)),
    ReduceL1=_reduction(lambda x, axes, keepdims: _sum(np.abs(x), axes, keepdims)),
    ReduceL2=_reduction(lambda x, axes, keepdims: np.sqrt(_sum(np.square(x), axes, keepdims))),
    ReduceLogSum=_reduction(lambda x, axes, keepdims: np.log(_sum(x, axes, keepdims))),
    ReduceLogSumExp=_reduction(_log_sum_exp),
    ReduceSumSquare=_reduction(lambda x, axes, keepdims: _sum(np.square(x), axes, keepdims)),
)


@operators.define("ArgMax")
def arg_max(x, *, axis, keepdims, select_last_index):
    return _place(np.argmax, widen(x), axis, keepdims, select_last_index)


@operators.define("ArgMin")
def arg_min(x, *, axis, keepdims, select_last_index):
    return _place(np.argmin, widen(x), axis, keepdims, select_last_index)


@operators.define("CumSum")
@in_float32
def cum_sum(x, axis, *, exclusive, reverse):
    return _cumulate(np.cumsum, 0, x, axis.item(), exclusive, reverse)


@operators.define("CumProd")
@in_float32
def cum_prod(x, axis, *, exclusive, reverse):
    return _cumulate(np.cumprod, 1, x, axis.item(), exclusive, reverse)


@operators.define("TopK")
def top_k(x, k, *, axis, largest, sorted):
    """Sorted in any case; of what is equal, the first comes first."""
    keys = widen(x)
    if largest:
        order = x.shape[axis] - 1 - np.flip(np.argsort(np.flip(keys, axis), axis, kind="stable"), axis)
    else:
        order = np.argsort(keys, axis, kind="stable")
    order = order.take(range(k.item()), axis)
    return np.take_along_axis(x, order, axis), order


def _place(function, x, axis, keepdims, last):
    if not last:
        return function(x, axis, keepdims=bool(keepdims))
    return x.shape[axis] - 1 - function(np.flip(x, axis), axis, keepdims=bool(keepdims))


def _cumulate(function, start, x, axis, exclusive, reverse):
    x = np.flip(x, axis) if reverse else x
    if exclusive:
        before = np.moveaxis(np.full_like(x, start), axis, 0)
        before[1:] = np.moveaxis(x, axis, 0)[:-1]
        x = np.moveaxis(before, 0, axis)
    y = function(x, axis, x.dtype)
    return np.flip(y, axis) if reverse else y
