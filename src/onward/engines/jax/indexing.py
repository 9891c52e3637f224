"""Elements that are chosen by position. Negative positions count from the end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.engines.framework import Operators
from onward.engines.jax.values import known_array

operators = Operators()


@operators.define("Gather")
def gather(x, indices, *, axis):
    return jnp.take(x, wrap_indices(indices, x.shape[axis]), axis, mode="clip")


def wrap_indices(indices, size):
    return short(jnp.where(indices < 0, indices + size, indices), size)


def short(indices, size):
    """In 32 bits where these suffice: a compiled caller whose JAX has no others can then take them, too."""
    return indices.astype(np.int32) if size < 2**31 else indices


@operators.define("GatherElements")
def gather_elements(x, indices, *, axis):
    return x[_along(wrap_indices(indices, x.shape[axis]), axis)]


def _along(indices, axis):
    """The places of all elements of `indices`, which say where along one axis."""
    places = list(np.ix_(*map(np.arange, indices.shape)))
    places[axis] = indices
    return tuple(places)


@operators.define("GatherND")
def gather_nd(x, indices, *, batch_dims):
    return x[_places(short(indices, max(x.shape)), batch_dims)]


def _places(indices, batch_dims=0):
    """Index tuples along the last axis, as one array per axis; the first axes go along with those of the result."""
    free = indices.ndim - 1 - batch_dims
    batch = (
        places.reshape(*places.shape, *[1] * free) for places in np.ix_(*map(np.arange, indices.shape[:batch_dims]))
    )
    return (*batch, *jnp.moveaxis(indices, -1, 0))


@operators.define("ScatterElements")
def scatter_elements(x, indices, updates, *, axis, reduction):
    return _scatter(x, _along(wrap_indices(indices, x.shape[axis]), axis), updates, reduction)


@operators.define("ScatterND")
def scatter_nd(x, indices, updates, *, reduction):
    return _scatter(x, _places(short(indices, max(x.shape))), updates, reduction)


def _scatter(x, places, updates, reduction):
    if reduction == "mul":
        return _scatter_product(x, places, updates)
    at = x.at[places]
    return {"none": at.set, "add": at.add, "max": at.max, "min": at.min}[reduction](updates)


@jax.custom_jvp
def _scatter_product(x, places, updates):
    return x.at[places].multiply(updates)


@_scatter_product.defjvp
def _multiplied_jvp(given, tangents):
    """JAX has a derivative only where no two factors meet: here they come one after the other."""
    x, places, updates = given
    places = jnp.broadcast_arrays(*places)
    rows = [at.reshape(-1) for at in places]

    def multiply(x, updates):
        factors = updates.reshape(-1, *updates.shape[places[0].ndim :])
        return lax.scan(
            lambda x, one: (x.at[one[0]].multiply(one[1], unique_indices=True), None), x, (tuple(rows), factors)
        )

    (y, _), (change, _) = jax.jvp(multiply, (x, updates), (tangents[0], tangents[2]))
    return y, change


@operators.define("OneHot")
def one_hot(indices, depth, values, *, axis):
    size = depth.item()
    places = jnp.expand_dims(jnp.where(indices < 0, indices + size, indices), axis)
    axis %= places.ndim
    hot = places == jnp.arange(size, dtype=places.dtype).reshape([-1 if i == axis else 1 for i in range(places.ndim)])
    return jnp.where(hot, values[1], values[0])


@operators.define("Compress")
def compress(x, condition, *, axis=None):
    places = np.flatnonzero(known_array(condition))
    return jnp.take(x.reshape(-1) if axis is None else x, places, 0 if axis is None else axis)


operators(
    NonZero=lambda x: (
        np.stack(np.nonzero(known_array(x))) if x.ndim else np.zeros((0, int(known_array(x) != 0)), np.int64)
    )
)


@operators.define("Unique")
def unique(x, *, axis=None, sorted):
    values, first, inverse, counts = np.unique(known_array(x), True, True, True, axis)
    if not sorted:
        order = np.argsort(first)
        values = np.take(values, order, 0 if axis is None else axis)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
    return values, first, inverse.reshape(-1), counts


@operators.define("NonMaxSuppression")
def non_max_suppression(boxes, scores, *limits, center_point_box):
    from onward.engines.numpy import Numpy

    return Numpy.operators["NonMaxSuppression"](
        known_array(boxes), known_array(scores), *limits, center_point_box=center_point_box, outputs=1
    )
