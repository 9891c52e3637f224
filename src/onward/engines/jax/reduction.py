"""Reductions, and what runs along an axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.engines.framework import Operators
from onward.engines.shared.arrays import is_float
from onward.engines.shared.reduction import reduction, running

operators = Operators()


operators(
    ReduceMax=reduction(lambda x, **options: jnp.max(x, initial=_smallest(x) if x.size == 0 else None, **options)),
    ReduceMin=reduction(lambda x, **options: jnp.min(x, initial=_largest(x) if x.size == 0 else None, **options)),
    ReduceLogSumExp=reduction(jax.nn.logsumexp),
)


def _largest(x):
    if is_float(x.dtype):
        return jnp.inf
    return x.dtype.type(x.dtype == bool or jnp.iinfo(x.dtype).max)


def _smallest(x):
    if is_float(x.dtype):
        return -jnp.inf
    return x.dtype.type(x.dtype != bool and jnp.iinfo(x.dtype).min)


operators(CumSum=running(lax.cumsum, 0), CumProd=running(lax.cumprod, 1))


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
