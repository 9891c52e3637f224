"""Operators that read and write elements at places that are computed."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.tensorflow.sizes import elements, is_vector_of_sizes, shape_of, size_of, vector
from onward.engines.tensorflow.tensors import on_host, to_numpy

operators = Operators()


def from_start(indices, size):
    """Indices, of which negative ones count from the end."""
    return tf.where(indices < 0, indices + tf.cast(size, indices.dtype), indices)


@operators.define("Gather")
def gather(x, indices, *, axis):
    if is_vector_of_sizes(x) and (chosen := tf.get_static_value(indices)) is not None:
        sizes = elements(x)
        if np.ndim(chosen):
            return vector([sizes[i] for i in chosen.reshape(-1)])
        size = sizes[int(chosen)]
        return np.array(size, np.int64) if isinstance(size, int) else size
    return tf.gather(x, from_start(indices, size_of(x, axis)), axis=axis)


@operators.define("GatherElements")
def gather_elements(x, indices, *, axis):
    rank = x.shape.rank
    order = [i for i in range(rank) if i != axis % rank] + [axis % rank]
    places = tf.transpose(from_start(indices, size_of(x, axis)), order)
    rows = tf.transpose(x, order)[tuple(map(slice, shape_of(places)[:-1]))]  # there may be fewer of indices
    return tf.transpose(tf.gather(rows, places, batch_dims=rank - 1), np.argsort(order))


@operators.define("GatherND")
def gather_nd(x, indices, *, batch_dims):
    indexed = shape_of(x)[batch_dims : batch_dims + indices.shape[-1]]
    return tf.gather_nd(x, from_start(indices, vector(indexed)), batch_dims)


@operators.define("ScatterElements")
def scatter_elements(x, indices, updates, *, axis, reduction):
    places = tf.meshgrid(*(tf.range(tf.cast(size, indices.dtype)) for size in shape_of(indices)), indexing="ij")
    places[axis] = from_start(indices, size_of(x, axis))
    return scatter(x, tf.stack(places, -1), updates, reduction)


@operators.define("ScatterND")
def scatter_nd(x, indices, updates, *, reduction):
    return scatter(x, from_start(indices, vector(shape_of(x)[: indices.shape[-1]])), updates, reduction)


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
