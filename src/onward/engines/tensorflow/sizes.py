"""Sizes of tensors: numbers as far as they are known, and scalar tensors where only a run knows them.

A vector of sizes is an array where all are known. Else it is the stack of its elements, which are found in it again, so
that what depends on known sizes stays known and only the rest is computed when a graph runs.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Size = Any
"""A number of Python, or a scalar tensor."""


def size_of(x: tf.Tensor, axis: int) -> Size:
    known = x.shape[axis]
    return tf.shape(x, tf.int64)[axis] if known is None else known


def shape_of(x: tf.Tensor) -> list[Size]:
    return [size_of(x, axis) for axis in range(x.shape.rank)]


def product(sizes: Sequence[Size]) -> Size:
    """Of numbers first, so that what is not known is multiplied once."""
    known = functools.reduce(operator.mul, (size for size in sizes if isinstance(size, int)), 1)
    return functools.reduce(operator.mul, (size for size in sizes if not isinstance(size, int)), known)


def vector(elements: Sequence[Size]) -> Any:
    """Elements as one vector: an array if all are known."""
    if all(isinstance(element, int) for element in elements):
        # TensorFlow takes arrays for int32 where it can choose, and cuts off what is larger.
        is_large = any(element > np.iinfo(np.int32).max for element in elements)
        return tf.constant(elements, tf.int64) if is_large else np.array(elements, np.int64)
    return tf.stack([tf.cast(element, tf.int64) for element in elements])


def elements(vector: Any) -> list[Size]:
    """The elements of a vector, as numbers as far as they are known."""
    if (known := tf.get_static_value(vector)) is not None:
        return list(np.asarray(known).reshape(-1).tolist())
    if is_vector_of_sizes(vector):
        return [number(element) for element in vector.op.inputs]
    return [vector] if vector.shape.rank == 0 else [vector[i] for i in range(vector.shape[0])]


def number(element: tf.Tensor) -> Size:
    known = tf.get_static_value(element)
    return element if known is None else int(known)


def is_vector_of_sizes(x: Any) -> bool:
    return tf.is_symbolic_tensor(x) and x.shape.rank == 1 and x.dtype == tf.int64 and x.op.type == "Pack"


def is_size(x: Any) -> bool:
    """Whether a tensor may be a size that only a run knows."""
    return tf.is_symbolic_tensor(x) and x.shape.rank == 0 and x.dtype == tf.int64


def wider(a: Size, b: Size) -> Size:
    """The size that two of them have together. One that is known, and not 1, is right whatever the other is."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b) if a and b else 0
    known, other = (a, b) if isinstance(a, int) else (b, a)
    if isinstance(known, int):
        return other if known == 1 else known
    return tf.maximum(tf.cast(a, tf.int64), tf.cast(b, tf.int64))
