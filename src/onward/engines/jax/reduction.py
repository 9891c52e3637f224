"""Reductions, and what runs along an axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.engines.framework import Operators

operators = Operators()


def _reduction(function):
    """Over all axes where none is given, or over none."""

    def reduce(x, axes=None, *, keepdims, noop_with_empty_axes):
        given = axes is not None and axes.size
        over = tuple(axes.tolist()) if given else () if noop_with_empty_axes else None
        return function(x, axis=over, keepdims=bool(keepdims)).astype(x.dtype)

    return reduce


def _sum(x, **options):
    return jnp.sum(x, dtype=x.dtype, **options)


operators(
    ReduceSum=_reduction(_sum),
    ReduceMean=_reduction(jnp.mean),
    ReduceMax=_reduction(lambda x, **options: jnp.max(x, initial=_smallest(x) if x.size == 0 else None, **options)),
    ReduceMin=_reduction(lambda x, **options: jnp.min(x, initial=_largest(x) if x.size == 0 else None, **options)),
    ReduceProd=_reduction(lambda x, **options: jnp.prod(x, dtype=x.dtype, **options)),
    ReduceL1=_reduction(lambda x, **options: _sum(jnp.abs(x), **options)),
    ReduceL2=_reduction(lambda x, **options: _root(_sum(x * x, **options))),
    ReduceLogSum=_reduction(lambda x, **options: jnp.log(_sum(x, **options))),
    ReduceLogSumExp=_reduction(jax.nn.logsumexp),
    ReduceSumSquare=_reduction(lambda x, **options: _sum(x * x, **options)),
)


def _largest(x):
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.inf
    return x.dtype.type(x.dtype == bool or jnp.iinfo(x.dtype).max)


def _smallest(x):
    if jnp.issubdtype(x.dtype, jnp.floating):
        return -jnp.inf
    return x.dtype.type(x.dtype != bool and jnp.iinfo(x.dtype).min)


def _root(squares):
    """The square root; where it is 0 the slope is taken to be 0."""
    return jnp.where(squares == 0, 0, jnp.sqrt(jnp.where(squares == 0, 1, squares)))


def _place(function):
    def place(x, *, axis, keepdims, select_last_index):
        if select_last_index:
            return x.shape[axis] - 1 - function(jnp.flip(x, axis), axis, keepdims=bool(keepdims))
        return function(x, axis, keepdims=bool(keepdims))

    return place


operators(ArgMax=_place(jnp.argmax), ArgMin=_place(jnp.argmin))


def _running(function, neutral):
    def run(x, axis, *, exclusive, reverse):
        axis = axis.item() % x.ndim
        if exclusive:
            before, after = ((0, 1) if reverse else (1, 0)), ((1, None) if reverse else (0, -1))
            pads = [before if i == axis else (0, 0) for i in range(x.ndim)]
            kept = tuple(slice(*after) if i == axis else slice(None) for i in range(x.ndim))
            x = jnp.pad(x, pads, constant_values=neutral)[kept]
        return function(x, axis, reverse=bool(reverse))

    return run


operators(CumSum=_running(lax.cumsum, 0), CumProd=_running(lax.cumprod, 1))


@operators.define("TopK")
def top_k(x, k, *, axis, largest, sorted):
    count = np.asarray(k).item()
    last = jnp.moveaxis(x, axis, -1)
    if largest:
        values, places = lax.top_k(last, count)
    else:
        places = jnp.argsort(last, -1, stable=True)[..., :count]
        values = jnp.take_along_axis(last, places, -1)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(places, -1, axis).astype(np.int64)
