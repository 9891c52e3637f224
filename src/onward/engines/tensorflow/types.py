"""Types of tensors, sizes that only a run knows, and what TensorFlow leaves to the host."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import tensorflow as tf

from onward.engines.framework import Function, NotOnHost
from onward.engines.numpy import Numpy

TYPES = frozenset(
    np.dtype(dtype.as_numpy_dtype)
    for dtype in (
        tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.bool,
        tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64,
    )
)  # fmt: skip
"""Types that have kernels for nearly all operators; float8 and what is smaller than a byte have few."""


def _keeping(find: Function) -> Function:
    """A function that finds places along an axis, which may be kept."""

    def place(x, axis, keepdims):
        return tf.expand_dims(find(x, axis), axis) if keepdims else find(x, axis)

    return place


class Functions:
    """Functions of TensorFlow under the names that numpy has for them."""

    argmax = staticmethod(_keeping(tf.argmax))
    argmin = staticmethod(_keeping(tf.argmin))
    arctan = staticmethod(tf.atan)
    arcsinh = staticmethod(tf.asinh)
    bitwise_not = staticmethod(tf.bitwise.invert)
    concatenate = staticmethod(tf.concat)
    flip = staticmethod(tf.reverse)
    isinf = staticmethod(tf.math.is_inf)
    isnan = staticmethod(tf.math.is_nan)

    @staticmethod
    def pad(x, widths, constant_values=0):
        return tf.pad(x, widths, constant_values=tf.cast(constant_values, x.dtype)) if np.any(widths) else x

    @staticmethod
    def split(x, places, axis):
        return tf.split(x, [*np.diff([0, *places]), -1], axis)

    def __getattr__(self, name: str) -> Function:
        return next(getattr(module, name) for module in (tf, tf.math, tf.bitwise) if hasattr(module, name))


def dtype_of(number: int) -> tf.DType | None:
    """The type that a `to` or `dtype` attribute names, None if it is not one of `TYPES`."""
    dtype = ir.DataType(number)
    return tf.as_dtype(dtype.numpy()) if dtype != ir.DataType.STRING and dtype.numpy() in TYPES else None


def to_numpy(x: Any) -> np.ndarray:
    """A tensor as an array."""
    if tf.is_symbolic_tensor(x):
        raise NotOnHost
    return x.numpy() if isinstance(x, tf.Tensor) else np.asarray(x)


def on_host(operator: str) -> Function:
    """An operator that is computed by numpy: its result has no gradient, and often a shape that depends on values."""
    function = Numpy.operators[operator]

    @functools.wraps(function)
    def compute(*inputs, **attributes):
        return function(*(None if x is None else to_numpy(x) for x in inputs), **attributes)

    return compute


def scalar(number: float, like: tf.Tensor) -> tf.Tensor:
    return tf.constant(number, like.dtype)


def compute_as(function: Function, wider: dict[tf.DType, tf.DType]) -> Function:
    """A function whose inputs of some types are cast, and its results cast back."""

    @functools.wraps(function)
    def compute(x, *others, **attributes):
        dtype = wider.get(x.dtype)
        if dtype is None:
            return function(x, *others, **attributes)
        cast = (tf.cast(y, dtype) if tf.is_tensor(y) and y.dtype == x.dtype else y for y in others)
        return tf.cast(function(tf.cast(x, dtype), *cast, **attributes), x.dtype)

    return compute


FLOATS = {tf.float16: tf.float32, tf.bfloat16: tf.float32}
SMALL = dict.fromkeys((tf.int8, tf.int16, tf.uint8, tf.uint16), tf.int32)
UNSIGNED = {tf.uint32: tf.int64, tf.uint64: tf.int64}
"""Wider types to compute in. In the arithmetic of int64 the bits of uint64 are right."""


def wide(x: tf.Tensor) -> tf.Tensor:
    """Narrow floats as float32; all else as it is."""
    return tf.cast(x, FLOATS.get(x.dtype, x.dtype))


def sizes(x: tf.Tensor, first: int = 0) -> list[int]:
    """The shape of a tensor from an axis on, which is known unless it depends on values."""
    if not x.shape[first:].is_fully_defined():
        raise NotOnHost
    return x.shape[first:].as_list()


# ---- sizes -----------------------------------------------------------------------------------------------------------

# Sizes of tensors: numbers as far as they are known, and scalar tensors where only a run knows them.
#
# A vector of sizes is an array where all are known. Else it is the stack of its elements, which are found in it again:
# what depends on known sizes stays known, and only the rest is computed when a graph runs.

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
