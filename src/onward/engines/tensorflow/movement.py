"""Operators that move elements, and make tensors of a given size."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.tensorflow.tensors import compute_as, dtype_of, on_host, sizes

operators = Operators()


@operators.define("Shape")
def shape(x, *, start, end):
    """Known, but where a traced loop has gone round nobody knows how often."""
    part = x.shape[start:end]
    return np.array(part, np.int64) if part.is_fully_defined() else tf.shape(x, tf.int64)[start:end]


operators(Size=lambda x: np.array(math.prod(x.shape), np.int64) if x.shape.is_fully_defined() else tf.size(x, tf.int64))


@operators.define("Reshape")
def reshape(x, shape, *, allowzero):
    wanted = shape.tolist()
    if not allowzero:
        wanted = [size or x.shape[i] for i, size in enumerate(wanted)]
    return tf.reshape(x, wanted)


@operators.define("Flatten")
def flatten(x, *, axis):
    shape = sizes(x)
    return tf.reshape(x, [math.prod(shape[:axis]), math.prod(shape[axis:])])


@operators.define("Squeeze")
def squeeze(x, axes=None):
    return x if axes is not None and not axes.size else tf.squeeze(x, None if axes is None else axes.tolist())


@operators.define("Unsqueeze")
def unsqueeze(x, axes):
    rank = x.shape.rank + axes.size
    for axis in sorted(axis % rank for axis in axes.reshape(-1).tolist()):
        x = tf.expand_dims(x, axis)
    return x


operators(
    Transpose=lambda x, *, perm: tf.transpose(x, perm),
    Concat=lambda *xs, axis: tf.concat(xs, axis),
)


@operators.define("Split")
def split(x, parts=None, *, axis, num_outputs, outputs):
    return tuple(_parts(x, -(-x.shape[axis] // (num_outputs or outputs)) if parts is None else parts, axis))


@operators.define("Slice")
def slice_(x, starts, ends, axes=None, steps=None):
    axes = range(len(starts)) if axes is None else axes.tolist()
    steps = [1] * len(starts) if steps is None else steps.tolist()
    places = [slice(None)] * x.shape.rank
    for axis, start, end, step in zip(axes, starts.tolist(), ends.tolist(), steps, strict=True):
        start, end, step = slice(start, end, step).indices(x.shape[axis])
        places[axis] = slice(start, None if end < 0 else end, step) if start >= 0 else slice(0, 0)
    return x[tuple(places)]


operators(
    Expand=lambda x, shape: tf.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape.tolist()))),
    Tile=lambda x, repeats: compute_as(tf.tile, {tf.uint16: tf.int32})(x, repeats),
)


@operators.define("Pad")
def pad(x, pads, value=None, axes=None, *, mode):
    rank = x.shape.rank
    chosen = range(rank) if axes is None else [axis % rank for axis in axes.tolist()]
    before, after = np.zeros((2, rank), int)
    before[chosen], after[chosen] = np.split(pads, 2)
    kept = x[
        tuple(slice(max(0, -low), size + min(0, high)) for low, high, size in zip(before, after, x.shape, strict=True))
    ]
    widths = np.maximum(np.stack([before, after], 1), 0)
    if mode == "constant" and value is None:
        return tf.pad(kept, widths)
    if mode == "constant":  # in tf.pad it has no derivative
        inside = tf.pad(tf.ones(kept.shape, tf.bool), widths)
        return tf.where(inside, tf.pad(kept, widths), tf.reshape(value, []))
    for axis, width in enumerate(widths):
        if width.any():
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


operators(ConstantOfShape=on_host("ConstantOfShape"))


@operators.define("EyeLike")
def eye_like(x, *, dtype, k):
    rows, columns = x.shape
    kind = x.dtype if dtype is None else dtype_of(dtype)
    return on_host("EyeLike")(x, dtype=dtype, k=k) if kind is None else tf.cast(np.eye(rows, columns, k), kind)


operators(Range=on_host("Range"))


@operators.define("ConcatFromSequence")
def concat_from_sequence(sequence, *, axis, new_axis):
    return (tf.stack if new_axis else tf.concat)(sequence, axis)


@operators.define("SplitToSequence")
def split_to_sequence(x, parts=None, *, axis, keepdims):
    pieces = _parts(x, 1 if parts is None else parts, axis)
    return [tf.squeeze(piece, axis) for piece in pieces] if parts is None and not keepdims else pieces


def _parts(x, parts, axis):
    """The pieces of a tensor along an axis: of given sizes, or all of one size but the last, which may be smaller."""
    if np.ndim(parts):
        return tf.split(x, parts.tolist(), axis)
    length, size = x.shape[axis], int(parts)
    whole, rest = divmod(length, size)
    return tf.split(x, [size] * whole + [rest] * bool(rest), axis)
