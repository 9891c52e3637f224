"""Operators that move elements, and make tensors of a given size."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.shared.movement import cut_for_pad
from onward.engines.tensorflow.tensors import dtype_of, on_host, sizes

operators = Operators()


@operators.define("Shape")
def shape(x, *, start, end):
    """Known, but where a traced loop has gone round nobody knows how often."""
    part = x.shape[start:end]
    return np.array(part, np.int64) if part.is_fully_defined() else tf.shape(x, tf.int64)[start:end]


operators(Size=lambda x: np.array(math.prod(x.shape), np.int64) if x.shape.is_fully_defined() else tf.size(x, tf.int64))


@operators.define("Flatten")
def flatten(x, *, axis):
    shape = sizes(x)
    return tf.reshape(x, [math.prod(shape[:axis]), math.prod(shape[axis:])])


@operators.define("Pad")
def pad(x, pads, value=None, axes=None, *, mode):
    kept, widths = cut_for_pad(x, pads, axes)
    if mode == "constant" and value is None:
        return tf.pad(kept, widths)
    if mode == "constant":  # in tf.pad it has no derivative
        inside = tf.pad(tf.ones(kept.shape, tf.bool), widths)
        return tf.where(inside, tf.pad(kept, widths), tf.reshape(value, []))
    for axis, width in enumerate(widths):
        if any(width):
            kept = tf.gather(kept, np.pad(np.arange(kept.shape[axis]), width, mode), axis=axis)
    return kept


operators(
    ReverseSequence=lambda x, lengths, *, batch_axis, time_axis: tf.reverse_sequence(x, lengths, time_axis, batch_axis)
)


@operators.define("Trilu")
def trilu(x, k=None, *, upper):
    place = 0 if k is None else k.item()
    ones = np.ones(x.shape[-2:], bool)
    return tf.where(np.triu(ones, place) if upper else np.tril(ones, place), x, tf.zeros([], x.dtype))


@operators.define("EyeLike")
def eye_like(x, *, dtype, k):
    rows, columns = x.shape
    kind = x.dtype if dtype is None else dtype_of(dtype)
    return on_host("EyeLike")(x, dtype=dtype, k=k) if kind is None else tf.cast(np.eye(rows, columns, k), kind)
