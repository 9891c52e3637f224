"""Operators that read and write elements at places that are computed."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.reference import from_reference

operators = Operators()

operators(Gather=lambda x, indices, *, axis: np.take(x, indices, axis))


@operators.define("GatherElements")
def gather_elements(x, indices, *, axis):
    return x[_along(indices, axis)]


@operators.define("GatherND")
def gather_nd(x, indices, *, batch_dims):
    return x[(*np.ogrid[tuple(map(slice, indices.shape[:-1]))][:batch_dims], *np.moveaxis(indices, -1, 0))]


@operators.define("ScatterElements")
def scatter_elements(x, indices, updates, *, axis, reduction):
    return _scatter(x, _along(indices, axis), updates, reduction)


@operators.define("ScatterND")
def scatter_nd(x, indices, updates, *, reduction):
    return _scatter(x, tuple(np.moveaxis(indices, -1, 0)), updates, reduction)


@operators.define("OneHot")
def one_hot(indices, depth, values, *, axis):
    size = int(depth.item())
    places = np.where(indices < 0, indices + size, indices)
    off, on = values
    return np.where(np.expand_dims(places, axis) == _on_axis(np.arange(size), axis, indices.ndim + 1), on, off)


operators(
    Compress=lambda x, condition, *, axis: np.compress(condition, x, axis),
    NonZero=lambda x: np.argwhere(x).T,
)


@operators.define("Unique")
def unique(x, *, axis, sorted):
    values, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    if not sorted:
        order = np.argsort(first)
        values = values.take(order, axis or 0)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
    return values, first, inverse.reshape(-1), counts


operators(NonMaxSuppression=from_reference("NonMaxSuppression"))


def _on_axis(vector, axis, rank):
    """A vector that varies along one of `rank` axes."""
    return np.moveaxis(vector.reshape(-1, *[1] * (rank - 1)), 0, axis)


def _along(indices, axis):
    """Where elements are whose index along one axis is given, and along all others their own."""
    places = list(np.ogrid[tuple(map(slice, indices.shape))])
    places[axis] = indices
    return tuple(places)


_REDUCTIONS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _scatter(x, places, updates, reduction):
    result = x.copy()
    if reduction == "none":
        result[places] = updates
    else:
        _REDUCTIONS[reduction].at(result, places, updates)
    return result
