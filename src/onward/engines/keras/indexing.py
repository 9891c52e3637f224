"""Elements that are chosen by position. Negative positions count from the end."""

from __future__ import annotations

import keras
import numpy as np
from keras import ops

from onward.engines.framework import Operators
from onward.engines.keras.values import dtype_of, is_float

operators = Operators()


def from_start(indices, size):
    return ops.where(indices < 0, indices + ops.cast(size, dtype_of(indices)), indices)


def with_dense_gradient(x):
    """The same. TensorFlow's gradient would come row by row, and optimizers would square rows that occur twice."""
    return x * 1 if keras.backend.backend() == "tensorflow" and is_float(x) else x


@operators.define("Gather")
def take(x, indices, *, axis=0):
    return ops.take(with_dense_gradient(x), from_start(indices, ops.shape(x)[axis]), axis)


@operators.define("GatherElements")
def take_along(x, indices, *, axis=0):
    axis %= len(x.shape)
    places = from_start(indices, ops.shape(x)[axis])
    rows = x[tuple(slice(None) if i == axis else slice(ops.shape(places)[i]) for i in range(len(x.shape)))]
    return ops.take_along_axis(rows, places, axis)


def flat_places(indices, sizes):
    """Index tuples along the last axis, as places in what the indexed axes are as one."""
    places = 0
    for i, size in enumerate(sizes):
        size = ops.cast(size, dtype_of(indices))
        places = places * size + from_start(indices[..., i], size)
    return places


def product_of(sizes):
    result = 1
    for size in sizes:
        result = result * size
    return result


@operators.define("GatherND")
def take_nd(x, indices, *, batch_dims=0):
    shape, count = list(ops.shape(x)), indices.shape[-1]
    indexed, rest = shape[batch_dims : batch_dims + count], shape[batch_dims + count :]
    places = flat_places(indices, indexed)
    batch = product_of(shape[:batch_dims])
    rows = ops.reshape(x, [batch * product_of(indexed), *rest])
    if batch_dims:
        first = ops.reshape(ops.arange(batch), [*shape[:batch_dims], *[1] * (len(places.shape) - batch_dims)])
        places = places + ops.cast(first * product_of(indexed), dtype_of(places))
    return ops.take(with_dense_gradient(rows), places, 0)


@operators.define("ScatterElements")
def scatter_elements(x, indices, updates, *, axis=0, reduction="none"):
    shape, axis = list(ops.shape(x)), axis % len(x.shape)
    places = 0
    for i, size in enumerate(shape):
        along = [-1 if j == i else 1 for j in range(len(shape))]
        own = ops.reshape(ops.arange(ops.shape(indices)[i], dtype=dtype_of(indices)), along)
        own = from_start(indices, size) if i == axis else own
        places = places * ops.cast(size, dtype_of(indices)) + own
    y = scatter(ops.reshape(x, [-1]), ops.reshape(places, [-1]), ops.reshape(updates, [-1]), reduction)
    return ops.reshape(y, shape)


def scatter(x, places, updates, reduction):
    """Rows of a table replaced by others, or combined with them."""
    kinds = {"none": None, "add": "add", "max": "max", "min": "min", "mul": "mul"}
    return ops.scatter_update(x, places[:, None], updates, reduction=kinds[reduction])


@operators.define("ScatterND")
def scatter_nd(x, indices, updates, *, reduction="none"):
    shape, count = list(ops.shape(x)), indices.shape[-1]
    places = ops.reshape(flat_places(indices, shape[:count]), [-1])
    rows = ops.reshape(x, [product_of(shape[:count]), *shape[count:]])
    new = ops.reshape(updates, [-1, *shape[count:]])
    return ops.reshape(scatter(rows, places, new, reduction), shape)


@operators.define("OneHot")
def one_hot(indices, depth, values, *, axis=-1):
    size = depth[0] if isinstance(depth, list) else depth
    places = ops.expand_dims(from_start(indices, size), axis)
    axis %= len(places.shape)
    every = np.arange(size).reshape([-1 if i == axis else 1 for i in range(len(places.shape))])
    return ops.where(places == ops.convert_to_tensor(every, dtype_of(places)), values[1], values[0])
