"""Reductions, and what goes along an axis."""

from __future__ import annotations

import functools

import torch

from onward.engines.framework import Operators
from onward.engines.torch.types import in_int64

operators = Operators()


def _reduction(function):
    """A function of a tensor and axes, which keeps them, as a reduction."""

    @in_int64
    def reduce(x, axes=None, *, keepdims, noop_with_empty_axes):
        axes = [] if axes is None else axes.tolist()
        if not axes and noop_with_empty_axes:
            return function(x[None], (0,))[0]
        axes = tuple(axis % x.ndim for axis in axes) or tuple(range(x.ndim))
        y = function(x, axes) if axes else function(x[None], (0,))[0]
        return y if keepdims else y.squeeze(axes)

    return reduce


def _extreme(function, sign):
    """Which also has a value for no elements at all."""

    def reduce(x, axes):
        if all(x.shape[axis] for axis in axes):
            return function(x, axes, keepdim=True)
        worst = -sign * torch.inf if x.is_floating_point() else _lowest(x.dtype) if sign > 0 else _highest(x.dtype)
        return x.new_full([1 if i in axes else size for i, size in enumerate(x.shape)], worst)

    return reduce


def _lowest(dtype):
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _highest(dtype):
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _floating(function):
    """Integers by way of float64."""

    @functools.wraps(function)
    def reduce(x, axes):
        return function(x, axes) if x.is_floating_point() else function(x.double(), axes).to(x.dtype)

    return reduce


def _sum(x, axes):
    return x.sum(axes, keepdim=True, dtype=x.dtype)


def _prod(x, axes):
    return functools.reduce(lambda y, axis: y.prod(axis, keepdim=True, dtype=x.dtype), axes, x)


operators(
    ReduceSum=_reduction(_sum),
    ReduceMean=_reduction(_floating(lambda x, axes: x.mean(axes, keepdim=True))),
    ReduceMax=_reduction(_extreme(torch.amax, 1)),
    ReduceMin=_reduction(_extreme(torch.amin, -1)),
    ReduceProd=_reduction(_prod),
    ReduceL1=_reduction(lambda x, axes: _sum(x.abs(), axes)),
    ReduceL2=_reduction(_floating(lambda x, axes: torch.linalg.vector_norm(x, 2, axes, keepdim=True))),
    ReduceLogSum=_reduction(_floating(lambda x, axes: _sum(x, axes).log())),
    ReduceLogSumExp=_reduction(_floating(lambda x, axes: torch.logsumexp(x, axes, keepdim=True))),
    ReduceSumSquare=_reduction(lambda x, axes: _sum(x * x, axes)),
)


@operators.define("TopK")
def top_k(x, k, *, axis, largest, sorted):
    """By sorting, since of equal elements the first counts."""
    values, indices = x.sort(dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, k.item()), indices.narrow(axis, 0, k.item())
