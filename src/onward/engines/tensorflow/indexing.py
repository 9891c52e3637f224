"""Operators that read and write elements at places that are computed."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.tensorflow.tensors import length, on_host, sizes, to_numpy

operators = Operators()


def from_start(indices, size):
    """Indices, of which negative ones count from the end."""
    return tf.where(indices < 0, indices + tf.cast(size, indices.dtype), indices)


operators(
    Gather=lambda x, indices, *, axis: tf.gather(x, from_start(indices, length(x, axis)), axis=axis),
)


@operators.define("GatherElements")
def gather_elements(x, indices, *, axis):
    order = [i for i in range(x.shape.rank) if i != axis % x.shape.rank] + [axis % x.shape.rank]
    places = tf.transpose(from_start(indices, x.shape[axis]), order)
    rows = tf.transpose(x, order)[tuple(map(slice, places.shape[:-1]))]  # there may be fewer of indices
    return tf.transpose(tf.gather(rows, places, batch_dims=x.shape.rank - 1), np.argsort(order))


@operators.define("GatherND")
def gather_nd(x, indices, *, batch_dims):
    indexed = x.shape[batch_dims : batch_dims + indices.shape[-1]]
    return tf.gather_nd(x, from_start(indices, indexed.as_list()), batch_dims)


@operators.define("ScatterElements")
def scatter_elements(x, indices, updates, *, axis, reduction):
    places = list(np.indices(sizes(indices), indices.dtype.as_numpy_dtype))
    places[axis] = from_start(indices, x.shape[axis])
    return scatter(x, tf.stack(places, -1), updates, reduction)


@operators.define("ScatterND")
def scatter_nd(x, indices, updates, *, reduction):
    return scatter(x, from_start(indices, x.shape[: indices.shape[-1]].as_list()), updates, reduction)


_REDUCTIONS = {
    "none": tf.tensor_scatter_nd_update,
    "add": tf.tensor_scatter_nd_add,
    "max": tf.tensor_scatter_nd_max,
    "min": tf.tensor_scatter_nd_min,
}


def scatter(x, places, updates, reduction):
    """What is there, with updates at places that count from the start."""
    if reduction in _REDUCTIONS:
        return _REDUCTIONS[reduction](x, places, updates)
    depth = places.shape[-1]
    steps = [math.prod(x.shape[i + 1 : depth]) for i in range(depth)]
    rows = tf.reshape(tf.reduce_sum(places * tf.constant(steps, places.dtype), -1), [-1])
    factors = tf.reshape(updates, [-1, *x.shape[depth:]])
    return x * tf.reshape(tf.math.unsorted_segment_prod(factors, rows, math.prod(x.shape[:depth])), x.shape)


@operators.define("OneHot")
def one_hot(indices, depth, values, *, axis):
    size = int(depth.item())
    places = tf.cast(indices, tf.int64)
    chosen = tf.one_hot(from_start(places, size), size, True, False, axis % (places.shape.rank + 1), tf.bool)
    return tf.where(chosen, values[1], values[0])


@operators.define("Compress")
def compress(x, condition, *, axis):
    chosen = np.flatnonzero(to_numpy(condition))
    return tf.gather(tf.reshape(x, [-1]), chosen) if axis is None else tf.gather(x, chosen, axis=axis)


operators(NonZero=on_host("NonZero"), Unique=on_host("Unique"), NonMaxSuppression=on_host("NonMaxSuppression"))
