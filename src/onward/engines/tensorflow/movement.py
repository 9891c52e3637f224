"""Operators that move elements, and that choose elements by index."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.shared.movement import cut_for_pad
from onward.engines.tensorflow.types import (
    compute_as,
    dtype_of,
    elements,
    is_size,
    is_vector_of_sizes,
    number,
    on_host,
    product,
    scalar,
    shape_of,
    size_of,
    to_numpy,
    vector,
    wider,
)

operators = Operators()


@operators.define("Shape")
def shape(x, *, start, end):
    return tf.shape(x, tf.int64)[start:end] if x.shape.rank is None else vector(shape_of(x)[start:end])


@operators.define("Size")
def size(x):
    count = tf.size(x, tf.int64) if x.shape.rank is None else product(shape_of(x))
    return np.array(count, np.int64) if isinstance(count, int) else count


@operators.define("Reshape")
def reshape(x, shape, *, allowzero):
    target = elements(shape)
    if is_size(x) and len(target) == 1:
        return vector([number(x)])
    if not allowzero:
        target = [size_of(x, i) if isinstance(size, int) and size == 0 else size for i, size in enumerate(target)]
    unknown = [i for i, size in enumerate(target) if not isinstance(size, int)]
    if len(unknown) == 1 and all(size > 0 for i, size in enumerate(target) if i not in unknown):
        target[unknown[0]] = -1
    return tf.reshape(x, vector(target))


@operators.define("Flatten")
def flatten(x, *, axis):
    sizes = shape_of(x)
    return tf.reshape(x, vector([product(sizes[:axis]), product(sizes[axis:])]))


@operators.define("Unsqueeze")
def unsqueeze(x, axes):
    if is_size(x) and axes.size == 1:
        return vector([number(x)])
    rank = x.shape.rank + axes.size
    for axis in sorted(axis % rank for axis in axes.reshape(-1).tolist()):
        x = tf.expand_dims(x, axis)
    return x


@operators.define("Concat")
def concat(*xs, axis):
    if any(map(is_vector_of_sizes, xs)):
        return vector([element for x in xs for element in elements(x)])
    return tf.concat(xs, axis)


@operators.define("Slice")
def slice_(x, starts, ends, axes=None, steps=None):
    begins, ends = elements(starts), elements(ends)
    axes = range(len(begins)) if axes is None else elements(axes)
    steps = [1] * len(begins) if steps is None else elements(steps)
    slices = [slice(None)] * x.shape.rank
    for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
        slices[axis] = _slice(begin, end, step, x.shape[axis])
    if is_vector_of_sizes(x) and all(isinstance(end, int | None) for end in (slices[0].start, slices[0].stop)):
        return vector(elements(x)[slices[0]])
    return x[tuple(slices)]


def _slice(begin, end, step, size):
    """Return a slice within a known size. Else None stands for a bound beyond any size."""
    if size is None or not (isinstance(begin, int) and isinstance(end, int)):
        return slice(
            *(None if isinstance(bound, int) and abs(bound) >= _FAR else bound for bound in (begin, end)), step
        )
    begin, end, step = slice(begin, end, step).indices(size)
    return slice(begin, None if end < 0 else end, step) if begin >= 0 else slice(0, 0)


_FAR = (1 << 31) - 1


@operators.define("Expand")
def expand(x, shape):
    own, target = shape_of(x), elements(shape)
    rank = max(len(own), len(target))
    pairs = zip(*([1] * (rank - len(sizes)) + sizes for sizes in (own, target)), strict=True)
    return tf.broadcast_to(x, vector([wider(a, b) for a, b in pairs]))


operators(Tile=lambda x, repeats: compute_as(tf.tile, {tf.uint16: tf.int32})(x, vector(elements(repeats))))


@operators.define("Pad")
def pad(x, pads, value=None, axes=None, *, mode):
    y, widths = cut_for_pad(x, pads, axes) if isinstance(pads, np.ndarray) else _cut_in_graph(x, pads, axes)
    if mode == "constant" and value is None:
        return tf.pad(y, widths)
    if mode == "constant":  # the value has no derivative in tf.pad
        inside = tf.pad(tf.ones_like(y, tf.bool), widths)
        return tf.where(inside, tf.pad(y, widths), tf.reshape(value, []))
    for axis, (before, after) in enumerate(widths):
        if tf.is_tensor(before) or tf.is_tensor(after) or before or after:
            size = tf.cast(size_of(y, axis), tf.int64)
            places = tf.range(-before, size + after)
            if mode == "edge":
                places = tf.clip_by_value(places, 0, size - 1)
            elif mode == "wrap":
                places = places % size
            else:
                around = places % tf.maximum(2 * (size - 1), 1)
                places = tf.minimum(around, 2 * (size - 1) - around)
            y = tf.gather(y, places, axis=axis)
    return y


def _cut_in_graph(x, pads, axes):
    """Return what `cut_for_pad` returns, for padding that is computed from open sizes."""
    found, rank = elements(pads), x.shape.rank
    positive = lambda size: max(size, 0) if isinstance(size, int) else tf.maximum(size, 0)
    amounts = [(0, 0)] * rank
    for i, axis in enumerate(range(rank) if axes is None else axes.tolist()):
        amounts[axis] = found[i], found[len(found) // 2 + i]
    sizes = [tf.cast(size_of(x, axis), tf.int64) for axis in range(rank)]
    ends = [size - positive(-after) for size, (_, after) in zip(sizes, amounts, strict=True)]
    y = x[tuple(slice(positive(-before), end) for (before, _), end in zip(amounts, ends, strict=True))]
    return y, [(positive(before), positive(after)) for before, after in amounts]


operators(
    ReverseSequence=lambda x, lengths, *, batch_axis, time_axis: tf.reverse_sequence(x, lengths, time_axis, batch_axis)
)


@operators.define("Trilu")
def trilu(x, k=None, *, upper):
    diagonal = 0 if k is None else k.item()
    columns, rows = (tf.range(tf.cast(size_of(x, axis), tf.int64)) for axis in (-1, -2))
    distance = columns[None] - rows[:, None]
    return tf.where(distance >= diagonal if upper else distance <= diagonal, x, scalar(0, x))


@operators.define("ConstantOfShape")
def constant_of_shape(shape, *, value):
    if isinstance(shape, np.ndarray):
        return on_host("ConstantOfShape")(shape, value=value)
    return tf.fill(vector(elements(shape)), np.float32(0) if value is None else value.reshape([]))


@operators.define("EyeLike")
def eye_like(x, *, dtype, k):
    rows, columns = x.shape
    type_ = x.dtype if dtype is None else dtype_of(dtype)
    return on_host("EyeLike")(x, dtype=dtype, k=k) if type_ is None else tf.cast(np.eye(rows, columns, k), type_)


@operators.define("Range")
def range_(*numbers):
    if all(isinstance(x, np.ndarray) for x in numbers):
        return on_host("Range")(*numbers)
    return tf.range(*map(tf.convert_to_tensor, numbers))


# ---- indexing --------------------------------------------------------------------------------------------------------


def from_start(indices, size):
    """Return indices without negative ones, which count from the end."""
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
    aligned = tf.transpose(from_start(indices, size_of(x, axis)), order)
    rows = tf.transpose(x, order)[tuple(map(slice, shape_of(aligned)[:-1]))]  # indices may have fewer rows
    return tf.transpose(tf.gather(rows, aligned, batch_dims=rank - 1), np.argsort(order))


@operators.define("GatherND")
def gather_nd(x, indices, *, batch_dims):
    indexed = shape_of(x)[batch_dims : batch_dims + indices.shape[-1]]
    return tf.gather_nd(x, from_start(indices, vector(indexed)), batch_dims)


@operators.define("ScatterElements")
def scatter_elements(x, indices, updates, *, axis, reduction):
    coordinates = tf.meshgrid(*(tf.range(tf.cast(size, indices.dtype)) for size in shape_of(indices)), indexing="ij")
    coordinates[axis] = from_start(indices, size_of(x, axis))
    return scatter(x, tf.stack(coordinates, -1), updates, reduction)


@operators.define("ScatterND")
def scatter_nd(x, indices, updates, *, reduction):
    return scatter(x, from_start(indices, vector(shape_of(x)[: indices.shape[-1]])), updates, reduction)


_REDUCTIONS = {
    "none": tf.tensor_scatter_nd_update,
    "add": tf.tensor_scatter_nd_add,
    "max": tf.tensor_scatter_nd_max,
    "min": tf.tensor_scatter_nd_min,
}


def scatter(x, coordinates, updates, reduction):
    """Return x with updates at coordinates, which must not be negative."""
    if reduction in _REDUCTIONS:
        return _REDUCTIONS[reduction](x, coordinates, updates)
    depth = coordinates.shape[-1]
    steps = [math.prod(x.shape[i + 1 : depth]) for i in range(depth)]
    rows = tf.reshape(tf.reduce_sum(coordinates * tf.constant(steps, coordinates.dtype), -1), [-1])
    factors = tf.reshape(updates, [-1, *x.shape[depth:]])
    return x * tf.reshape(tf.math.unsorted_segment_prod(factors, rows, math.prod(x.shape[:depth])), x.shape)


@operators.define("OneHot")
def one_hot(indices, depth, values, *, axis):
    size = int(depth.item())
    classes = tf.cast(indices, tf.int64)
    chosen = tf.one_hot(from_start(classes, size), size, True, False, axis % (classes.shape.rank + 1), tf.bool)
    return tf.where(chosen, values[1], values[0])


@operators.define("Compress")
def compress(x, condition, *, axis):
    chosen = np.flatnonzero(to_numpy(condition))
    return tf.gather(tf.reshape(x, [-1]), chosen) if axis is None else tf.gather(x, chosen, axis=axis)


operators(NonZero=on_host("NonZero"), Unique=on_host("Unique"), NonMaxSuppression=on_host("NonMaxSuppression"))
