"""Reductions, cumulative sums and products, and selection by order."""

from __future__ import annotations

import tensorflow as tf

from onward.run.framework import Operators
from onward.run.tensorflow.tensors import scalar

operators = Operators()


def _reduction(reduce):
    """A reduction over the axes that a node names: all if it names none, unless that is to change nothing."""

    def reduced(x, axes=None, *, keepdims, noop_with_empty_axes):
        if axes is not None and axes.size:
            return reduce(x, axes.tolist(), bool(keepdims))
        return reduce(x, [] if noop_with_empty_axes else None, bool(keepdims))

    return reduced


def _of_truth_values(reduce, logical):
    return lambda x, axes, keepdims: (logical if x.dtype == tf.bool else reduce)(x, axes, keepdims)


def _length(x, axes, keepdims):
    """The derivative at the zero vector is 0."""
    total = tf.reduce_sum(x * x, axes, keepdims)
    if not x.dtype.is_floating:
        return tf.cast(tf.sqrt(tf.cast(total, tf.float64)), x.dtype)
    zero = total == 0
    return tf.where(zero, scalar(0, x), tf.sqrt(tf.where(zero, scalar(1, x), total)))


def _in_floats(function):
    """What ends in a logarithm; of integers its whole part."""

    def compute(x, axes, keepdims):
        if x.dtype.is_floating:
            return function(x, axes, keepdims)
        return tf.cast(function(tf.cast(x, tf.float64), axes, keepdims), x.dtype)

    return compute


operators(
    ReduceSum=_reduction(tf.reduce_sum),
    ReduceMean=_reduction(tf.reduce_mean),
    ReduceMax=_reduction(_of_truth_values(tf.reduce_max, tf.reduce_any)),
    ReduceMin=_reduction(_of_truth_values(tf.reduce_min, tf.reduce_all)),
    ReduceProd=_reduction(tf.reduce_prod),
    ReduceL1=_reduction(lambda x, axes, keepdims: tf.reduce_sum(tf.abs(x), axes, keepdims)),
    ReduceL2=_reduction(_length),
    ReduceLogSum=_reduction(_in_floats(lambda x, axes, keepdims: tf.math.log(tf.reduce_sum(x, axes, keepdims)))),
    ReduceLogSumExp=_reduction(_in_floats(tf.reduce_logsumexp)),
    ReduceSumSquare=_reduction(lambda x, axes, keepdims: tf.reduce_sum(x * x, axes, keepdims)),
)


def _position(find):
    def position(x, *, axis, keepdims, select_last_index):
        if select_last_index:
            found = x.shape[axis] - 1 - find(tf.reverse(x, [axis % x.shape.rank]), axis)
        else:
            found = find(x, axis)
        return tf.expand_dims(found, axis) if keepdims else found

    return position


operators(
    ArgMax=_position(tf.argmax),
    ArgMin=_position(tf.argmin),
    CumSum=lambda x, axis, *, exclusive, reverse: tf.cumsum(x, axis.item(), bool(exclusive), bool(reverse)),
    CumProd=lambda x, axis, *, exclusive, reverse: tf.math.cumprod(x, axis.item(), bool(exclusive), bool(reverse)),
)


@operators.define("TopK")
def top_k(x, k, *, axis, largest, sorted):
    """Of elements that tie the one with the lower index comes first."""
    last = _swapped(x, axis)
    order = last if largest else _reversed_order(last)
    places = tf.math.top_k(order, k.item(), bool(sorted), index_type=tf.int64).indices
    return tuple(_swapped(y, axis) for y in (tf.gather(last, places, batch_dims=x.shape.rank - 1), places))


def _reversed_order(x):
    return tf.bitwise.invert(x) if x.dtype.is_integer else -x


def _swapped(x, axis):
    """With `axis` and the last axis in each other's place."""
    order = list(range(x.shape.rank))
    order[axis], order[-1] = order[-1], order[axis]
    return tf.transpose(x, order)
