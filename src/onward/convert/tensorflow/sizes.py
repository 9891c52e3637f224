"""TensorFlow's table for graphs that serve all sizes: where the interpreter has numbers, here are tensors.

A vector that says how large something is, is kept as its elements: numbers where they are known, scalar tensors where
they are not. So what depends on known sizes stays known, and only the rest is computed when the graph runs.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import Any

import numpy as np

from onward.engines.tensorflow.quiet import tensorflow as tf  # isort: skip  (other imports of it are not quiet)

from onward.engines.framework import Operators
from onward.engines.tensorflow import TensorFlow
from onward.engines.tensorflow.indexing import from_start, scatter
from onward.engines.tensorflow.tensors import length, scalar

operators = Operators()


class OpenSizes(TensorFlow):
    """TensorFlow while it records a graph whose sizes are not all known. Where that will run is decided later."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = Operators({**self.operators, **operators})

    def active(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def array(self, tensor: Any) -> Any:
        """The value, or where nobody knows it the tensor itself: operators of this table take both."""
        known = tf.get_static_value(tensor)
        return tensor if known is None else np.asarray(known)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def _size(x, axis):
    known = x.shape[axis]
    return tf.shape(x, tf.int64)[axis] if known is None else known


def _shape(x):
    return [_size(x, axis) for axis in range(x.shape.rank)]


def _product(sizes):
    """Of numbers first, so that what is not known is multiplied once."""
    known = functools.reduce(operator.mul, (size for size in sizes if isinstance(size, int)), 1)
    return functools.reduce(operator.mul, (size for size in sizes if not isinstance(size, int)), known)


def _vector(elements):
    """Elements as one vector: an array if all are known."""
    if all(isinstance(element, int) for element in elements):
        return np.array(elements, np.int64)
    return tf.stack([tf.cast(element, tf.int64) for element in elements])


def _elements(vector):
    """The elements of a vector, as numbers as far as they are known."""
    if isinstance(vector, np.ndarray):
        return vector.reshape(-1).tolist()
    if vector.op.type == "Pack" and vector.shape.rank == 1:
        return [_number(element) for element in vector.op.inputs]
    if vector.shape.rank == 0:
        return [vector]
    return [vector[i] for i in range(vector.shape[0])]


def _number(element):
    known = tf.get_static_value(element)
    return element if known is None else int(known)


def _is_vector_of_sizes(x):
    return tf.is_tensor(x) and x.shape.rank == 1 and x.dtype == tf.int64 and x.op.type == "Pack"


@operators.define("Shape")
def shape(x, *, start, end):
    return _vector(_shape(x)[start:end])


@operators.define("Size")
def size(x):
    count = _product(_shape(x))
    return np.array(count, np.int64) if isinstance(count, int) else count


@operators.define("Gather")
def gather(x, indices, *, axis):
    chosen = tf.get_static_value(indices)
    if _is_vector_of_sizes(x) and chosen is not None:
        elements = _elements(x)
        if np.ndim(chosen):
            return _vector([elements[i] for i in chosen.reshape(-1)])
        element = elements[int(chosen)]
        return np.array(element, np.int64) if isinstance(element, int) else element
    return tf.gather(x, from_start(indices, length(x, axis)), axis=axis)


@operators.define("Concat")
def concat(*xs, axis):
    if any(map(_is_vector_of_sizes, xs)):
        return _vector([element for x in xs for element in _elements(_known_value(x))])
    return tf.concat(xs, axis)


def _known_value(x):
    value = tf.get_static_value(x)
    return x if value is None else np.asarray(value)


@operators.define("Unsqueeze")
def unsqueeze(x, axes):
    if x.shape.rank == 0 and x.dtype == tf.int64:
        return _vector([_number(x)])
    rank = x.shape.rank + axes.size
    for axis in sorted(axis % rank for axis in axes.reshape(-1).tolist()):
        x = tf.expand_dims(x, axis)
    return x


# ---- operators that are told a size ----------------------------------------------------------------------------------


@operators.define("Reshape")
def reshape(x, shape, *, allowzero):
    wanted = _elements(shape)
    if x.shape.rank == 0 and x.dtype == tf.int64 and len(wanted) == 1:
        return _vector([_number(x)])
    if not allowzero:
        wanted = [_size(x, i) if isinstance(size, int) and size == 0 else size for i, size in enumerate(wanted)]
    unknown = [i for i, size in enumerate(wanted) if not isinstance(size, int)]
    if len(unknown) == 1 and all(
        isinstance(size, int) and size > 0 for i, size in enumerate(wanted) if i not in unknown
    ):
        wanted[unknown[0]] = -1
    return tf.reshape(x, _vector(wanted))


@operators.define("Flatten")
def flatten(x, *, axis):
    sizes = _shape(x)
    axis = axis % len(sizes) if axis < 0 else axis
    return tf.reshape(x, _vector([_product(sizes[:axis]), _product(sizes[axis:])]))


@operators.define("Slice")
def slice_(x, starts, ends, axes=None, steps=None):
    begins, ends = _elements(starts), _elements(ends)
    axes = range(len(begins)) if axes is None else _elements(axes)
    steps = [1] * len(begins) if steps is None else _elements(steps)
    places = [slice(None)] * x.shape.rank
    for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
        places[axis] = slice(_place(begin), _place(end), step)
    if _is_vector_of_sizes(x) and all(isinstance(part, int | None) for part in (places[0].start, places[0].stop)):
        return _vector(_elements(x)[places[0]])
    return x[tuple(places)]


_FAR = 1 << 31


def _place(place):
    """None for what is beyond any end."""
    return None if isinstance(place, int) and abs(place) >= _FAR - 1 else place


@operators.define("Expand")
def expand(x, shape):
    wanted = _elements(shape)
    rank = max(x.shape.rank, len(wanted))
    pairs = zip(_fill_sizes(_shape(x), rank), _fill_sizes(wanted, rank), strict=True)
    return tf.broadcast_to(x, _vector([_wider(a, b) for a, b in pairs]))


def _fill_sizes(sizes, rank):
    return [1] * (rank - len(sizes)) + sizes


def _wider(a, b):
    """The size that two of them have together. One that is known, and not 1, is right whatever the other is."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b) if a and b else 0
    known, other = (a, b) if isinstance(a, int) else (b, a)
    if isinstance(known, int):
        return other if known == 1 else known
    return tf.maximum(tf.cast(a, tf.int64), tf.cast(b, tf.int64))


operators(
    ConstantOfShape=lambda shape, *, value: tf.fill(
        _vector(_elements(shape)), np.float32(0) if value is None else value.reshape([])
    ),
    Range=lambda start, limit, delta: tf.range(*(tf.convert_to_tensor(x) for x in (start, limit, delta))),
    Tile=lambda x, repeats: tf.tile(x, _vector(_elements(repeats))),
)


@operators.define("Pad")
def pad(x, pads, value=None, axes=None, *, mode):
    rank = x.shape.rank
    chosen = list(range(rank)) if axes is None else [axis % rank for axis in axes.tolist()]
    before, after = np.zeros((2, rank), int)
    before[chosen], after[chosen] = np.split(pads, 2)
    kept = x[tuple(slice(max(0, -low), min(0, high) or None) for low, high in zip(before, after, strict=True))]
    widths = np.maximum(np.stack([before, after], 1), 0)
    if mode == "constant":  # its value has no derivative in tf.pad
        padded = tf.pad(kept, widths)
        return padded if value is None else tf.where(tf.pad(tf.ones_like(kept, tf.bool), widths), padded, value)
    for axis, width in enumerate(widths):
        if width.any():
            kept = tf.gather(kept, np.pad(np.arange(kept.shape[axis]), width, mode), axis=axis)
    return kept


@operators.define("Trilu")
def trilu(x, k=None, *, upper):
    place = 0 if k is None else k.item()
    distance = tf.range(_size(x, -1))[None] - tf.range(_size(x, -2))[:, None]
    return tf.where(distance >= place if upper else distance <= place, x, scalar(0, x))


@operators.define("GatherElements")
def gather_elements(x, indices, *, axis):
    rank = x.shape.rank
    order = [i for i in range(rank) if i != axis % rank] + [axis % rank]
    places = tf.transpose(from_start(indices, length(x, axis)), order)
    rows = tf.transpose(x, order)[tuple(slice(_size(places, i)) for i in range(rank - 1))]
    return tf.transpose(tf.gather(rows, places, batch_dims=rank - 1), np.argsort(order))


@operators.define("GatherND")
def gather_nd(x, indices, *, batch_dims):
    indexed = _shape(x)[batch_dims : batch_dims + indices.shape[-1]]
    return tf.gather_nd(x, from_start(indices, _vector(indexed)), batch_dims)


@operators.define("ScatterND")
def scatter_nd(x, indices, updates, *, reduction):
    return scatter(x, from_start(indices, _vector(_shape(x)[: indices.shape[-1]])), updates, reduction)


@operators.define("ScatterElements")
def scatter_elements(x, indices, updates, *, axis, reduction):
    ranges = [tf.range(tf.cast(size, indices.dtype)) for size in _shape(indices)]
    places = tf.meshgrid(*ranges, indexing="ij")
    places[axis] = from_start(indices, length(x, axis))
    return scatter(x, tf.stack(places, -1), updates, reduction)
