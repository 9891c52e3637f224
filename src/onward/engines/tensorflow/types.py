"""Types of tensors, dynamic sizes, and operators that run on the host."""

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
"""Types with kernels for nearly all operators. float8 and types below a byte have few."""


def _keeping(find: Function) -> Function:
    """Add `keepdims` to a function that returns indices along an axis."""

    def call(x, axis, keepdims):
        return tf.expand_dims(find(x, axis), axis) if keepdims else find(x, axis)

    return call


class Functions:
    """Functions of TensorFlow under the names of numpy."""

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
    def split(x, ends, axis):
        return tf.split(x, [*np.diff([0, *ends]), -1], axis)

    def __getattr__(self, name: str) -> Function:
        return next(getattr(module, name) for module in (tf, tf.math, tf.bitwise) if hasattr(module, name))


def dtype_of(number: int) -> tf.DType | None:
    """Return the type of an attribute `to` or `dtype`, or None if it is not in `TYPES`."""
    dtype = ir.DataType(number)
    return tf.as_dtype(dtype.numpy()) if dtype != ir.DataType.STRING and dtype.numpy() in TYPES else None


def to_numpy(x: Any) -> np.ndarray:
    """Return a tensor as an array. Raise `NotOnHost` during tracing."""
    if tf.is_symbolic_tensor(x):
        raise NotOnHost
    return x.numpy() if isinstance(x, tf.Tensor) else np.asarray(x)


def on_host(operator: str) -> Function:
    """Return an operator of numpy: without a gradient, often with a shape that depends on values."""
    function = Numpy.operators[operator]

    @functools.wraps(function)
    def compute(*inputs, **attributes):
        return function(*(None if x is None else to_numpy(x) for x in inputs), **attributes)

    return compute


def scalar(number: float, like: tf.Tensor) -> tf.Tensor:
    return tf.constant(number, like.dtype)


def compute_as(function: Function, wider: dict[tf.DType, tf.DType]) -> Function:
    """Wrap a function to compute some types in wider ones, and cast the result back."""

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
"""Type -> wider type to compute in. int64 arithmetic gives the right bits of uint64."""


def wide(x: tf.Tensor) -> tf.Tensor:
    """Cast narrow floats to float32."""
    return tf.cast(x, FLOATS.get(x.dtype, x.dtype))


def sizes(x: tf.Tensor, first: int = 0) -> list[int]:
    """Return the sizes from an axis on. Raise `NotOnHost` if one depends on values."""
    if not x.shape[first:].is_fully_defined():
        raise NotOnHost
    return x.shape[first:].as_list()


# ---- sizes -----------------------------------------------------------------------------------------------------------

# Sizes of tensors: numbers if they are known during tracing, else scalar tensors.
#
# A vector of sizes is an array if all are known. Else it is a stack, from which its elements can be
# read back. So known sizes stay known, and the graph computes only the others.

Size = Any
"""An int, or a scalar tensor."""


def size_of(x: tf.Tensor, axis: int) -> Size:
    size = x.shape[axis]
    return tf.shape(x, tf.int64)[axis] if size is None else size


def shape_of(x: tf.Tensor) -> list[Size]:
    return [size_of(x, axis) for axis in range(x.shape.rank)]


def product(sizes: Sequence[Size]) -> Size:
    """Multiply known sizes first, so that the graph has one multiplication per unknown size."""
    start = functools.reduce(operator.mul, (size for size in sizes if isinstance(size, int)), 1)
    return functools.reduce(operator.mul, (size for size in sizes if not isinstance(size, int)), start)


def vector(elements: Sequence[Size]) -> Any:
    """Stack elements to a vector: an array if all are known."""
    if all(isinstance(element, int) for element in elements):
        # TensorFlow reads arrays as int32 where it may choose the type, and truncates larger
        # numbers.
        is_large = any(element > np.iinfo(np.int32).max for element in elements)
        return tf.constant(elements, tf.int64) if is_large else np.array(elements, np.int64)
    return tf.stack([tf.cast(element, tf.int64) for element in elements])


def elements(vector: Any) -> list[Size]:
    """Return the elements of a vector, as ints where they are known."""
    if (array := tf.get_static_value(vector)) is not None:
        return list(np.asarray(array).reshape(-1).tolist())
    if is_vector_of_sizes(vector):
        return [number(element) for element in vector.op.inputs]
    return [vector] if vector.shape.rank == 0 else [vector[i] for i in range(vector.shape[0])]


def number(element: tf.Tensor) -> Size:
    value = tf.get_static_value(element)
    return element if value is None else int(value)


def is_vector_of_sizes(x: Any) -> bool:
    return tf.is_symbolic_tensor(x) and x.shape.rank == 1 and x.dtype == tf.int64 and x.op.type == "Pack"


def is_size(x: Any) -> bool:
    """True if a tensor may be a dynamic size."""
    return tf.is_symbolic_tensor(x) and x.shape.rank == 0 and x.dtype == tf.int64


def wider(a: Size, b: Size) -> Size:
    """Return the size of two broadcast axes. A known size other than 1 wins."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b) if a and b else 0
    static, other = (a, b) if isinstance(a, int) else (b, a)
    if isinstance(static, int):
        return other if static == 1 else static
    return tf.maximum(tf.cast(a, tf.int64), tf.cast(b, tf.int64))
