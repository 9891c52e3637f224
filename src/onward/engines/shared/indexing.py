"""Elements that are chosen by position. Negative positions count from the end."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.shared.arrays import place_along, xp

operators = Operators()


def wrap_indices(indices, size):
    return short(xp.where(indices < 0, indices + size, indices), size)


def short(indices, size):
    """In 32 bits where these suffice: a compiled caller whose JAX has no others can then take them, too."""
    return indices.astype(np.int32) if size < 2**31 else indices


def along(indices, axis):
    """The places of all elements of `indices`, which say where along one axis."""
    places = list(np.ix_(*map(np.arange, indices.shape)))
    places[axis] = indices
    return tuple(places)


def places_of(indices, batch_dims=0):
    """Index tuples along the last axis, as one array per axis; the first axes go along with those of the result."""
    free = indices.ndim - 1 - batch_dims
    batch = (
        places.reshape(*places.shape, *[1] * free) for places in np.ix_(*map(np.arange, indices.shape[:batch_dims]))
    )
    return (*batch, *xp.moveaxis(indices, -1, 0))


@operators.define("GatherElements")
def gather_elements(x, indices, *, axis):
    return x[along(wrap_indices(indices, x.shape[axis]), axis)]


@operators.define("GatherND")
def gather_nd(x, indices, *, batch_dims):
    return x[places_of(short(indices, max(x.shape)), batch_dims)]


@operators.define("OneHot")
def one_hot(indices, depth, values, *, axis):
    size = int(depth.item())
    places = xp.expand_dims(xp.where(indices < 0, indices + size, indices), axis)
    hot = places == place_along(np.arange(size).astype(places.dtype), axis, places.ndim)
    return xp.where(hot, values[1], values[0])


def unique_elements(x, axis, sorted):
    values, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    if not sorted:
        order = np.argsort(first)
        values = values.take(order, axis or 0)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
    return values, first, inverse.reshape(-1), counts
