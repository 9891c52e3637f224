"""Matmuls, reductions and Fourier transforms."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.tensorflow.types import FLOATS, SMALL, UNSIGNED, compute_as, scalar, wide

operators = Operators()

_INTEGERS = SMALL | UNSIGNED


@operators.define("MatMul")
def matmul(a, b):
    """Return the matmul. A vector is a row on the left, and a column on the right."""
    left = a[None] if a.shape.rank == 1 else a
    right = b[:, None] if b.shape.rank == 1 else b
    product = compute_as(tf.matmul, _INTEGERS)(left, right)
    removed = [axis for axis, x in ((-2, a), (-1, b)) if x.shape.rank == 1]
    return tf.squeeze(product, removed) if removed else product


@operators.define("Gemm")
def gemm(a, b, c=None, *, alpha, beta, transA, transB):
    product = compute_as(tf.matmul, _INTEGERS)(a, b, transpose_a=bool(transA), transpose_b=bool(transB))
    product = product if alpha == 1 else product * tf.cast(alpha, a.dtype)
    if c is None:
        return product
    return product + (c if beta == 1 else c * tf.cast(beta, c.dtype))


operators(
    Einsum=lambda *xs, equation: compute_as(lambda *ys: tf.einsum(equation, *ys), _INTEGERS)(*xs),
    Det=compute_as(tf.linalg.det, FLOATS),
)


# ---- reductions ------------------------------------------------------------------------------------------------------


def _reduction(reduce):
    """Return the operator of a function of a tensor, axes (None: all) and `keepdims`."""

    def reduced(x, axes=None, *, keepdims, noop_with_empty_axes):
        if axes is not None and axes.size:
            return reduce(x, axes.tolist(), bool(keepdims))
        return reduce(x, [] if noop_with_empty_axes else None, bool(keepdims))

    return reduced


def _product(x, axes, keepdims):
    """Multiply halves with halves: the second derivative of `tf.reduce_prod` is wrong at zeros."""
    if not x.dtype.is_floating:
        return tf.reduce_prod(x, axes, keepdims)
    rank = x.shape.rank
    over = list(range(rank)) if axes is None else [axis % rank for axis in axes]
    rest = [axis for axis in range(rank) if axis not in over]
    lines = tf.reshape(tf.transpose(x, [*rest, *over]), [*(x.shape[axis] for axis in rest), -1])
    while (size := lines.shape[-1]) > 1:
        middle = size // 2
        product = lines[..., :middle] * lines[..., middle : 2 * middle]
        lines = tf.concat([product, lines[..., 2 * middle :]], -1) if size % 2 else product
    shape = [1 if axis in over else x.shape[axis] for axis in range(rank) if keepdims or axis not in over]
    return tf.reshape(lines, shape) if size else tf.ones(shape, x.dtype)


def _log_sum_exp(x, axes, keepdims):
    """Return log-sum-exp, with the derivative 0 if all elements are -inf."""
    largest = tf.stop_gradient(tf.reduce_max(x, axes, keepdims=True))
    largest = tf.where(tf.math.is_inf(largest), scalar(0, x), largest)
    total = tf.reduce_sum(tf.exp(x - largest), axes, keepdims)
    zero = total == 0
    logarithm = tf.where(zero, scalar(-math.inf, x), tf.math.log(tf.where(zero, scalar(1, x), total)))
    return logarithm + tf.reshape(largest, tf.shape(total))  # sizes may be unknown


def _of_truth_values(reduce, logical):
    return lambda x, axes, keepdims: (logical if x.dtype == tf.bool else reduce)(x, axes, keepdims)


def _length(x, axes, keepdims):
    """Return the 2-norm, with the derivative 0 at the zero vector."""
    total = tf.reduce_sum(x * x, axes, keepdims)
    if not x.dtype.is_floating:
        return tf.cast(tf.sqrt(tf.cast(total, tf.float64)), x.dtype)
    zero = total == 0
    return tf.where(zero, scalar(0, x), tf.sqrt(tf.where(zero, scalar(1, x), total)))


def _in_floats(function):
    """Compute integers in float64, and truncate the result."""

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
    ReduceProd=_reduction(_product),
    ReduceL1=_reduction(lambda x, axes, keepdims: tf.reduce_sum(tf.abs(x), axes, keepdims)),
    ReduceL2=_reduction(_length),
    ReduceLogSum=_reduction(_in_floats(lambda x, axes, keepdims: tf.math.log(tf.reduce_sum(x, axes, keepdims)))),
    ReduceLogSumExp=_reduction(_in_floats(_log_sum_exp)),
    ReduceSumSquare=_reduction(lambda x, axes, keepdims: tf.reduce_sum(x * x, axes, keepdims)),
)


operators(CumSum=lambda x, axis, *, exclusive, reverse: tf.cumsum(x, axis.item(), bool(exclusive), bool(reverse)))


@operators.define("CumProd")
def cumulative_product(x, axis, *, exclusive, reverse):
    """Double the factors in each round: `tf.math.cumprod` has a wrong derivative at zeros."""
    axis = axis.item() % x.shape.rank
    y = tf.reverse(x, [axis]) if reverse else x
    y = _shift_along(y, 1, axis) if exclusive else y
    step = 1
    while step < x.shape[axis]:
        y, step = y * _shift_along(y, step, axis), 2 * step
    return tf.reverse(y, [axis]) if reverse else y


def _shift_along(x, step, axis):
    """Shift elements along an axis, and fill in ones."""
    size = x.shape[axis]
    rest = tf.gather(x, range(max(size - step, 0)), axis=axis)
    return tf.pad(rest, [(min(step, size) * (i == axis), 0) for i in range(x.shape.rank)], constant_values=1)


@operators.define("TopK")
def top_k(x, k, *, axis, largest, sorted):
    """Return the top k. Of equal elements the first comes first."""
    last = _swap_with_last(x, axis)
    order = last if largest else (tf.bitwise.invert(last) if last.dtype.is_integer else -last)
    count = k.item() if isinstance(k, np.ndarray) else tf.cast(tf.reshape(k, []), tf.int32)  # of an open size
    indices = tf.math.top_k(order, count, bool(sorted), index_type=tf.int64).indices
    return tuple(_swap_with_last(y, axis) for y in (tf.gather(last, indices, batch_dims=x.shape.rank - 1), indices))


def _swap_with_last(x, axis):
    """Swap an axis with the last axis."""
    order = list(range(x.shape.rank))
    order[axis], order[-1] = order[-1], order[axis]
    return tf.transpose(x, order)


# ---- Fourier transforms ----------------------------------------------------------------------------------------------


@operators.define("DFT")
def dft(x, length=None, axis=None, *, inverse, onesided):
    """Return the DFT. The last axis is (real, imaginary). A one-sided inverse transform is real."""
    axis = (-2 if axis is None else axis.item()) % x.shape.rank
    order = list(range(x.shape.rank - 1))
    order[axis], order[-1] = order[-1], order[axis]
    lines = tf.transpose(_complex(wide(x)), order)
    real = bool(inverse and onesided)
    size = length.item() if length is not None else 2 * (lines.shape[-1] - 1) if real else lines.shape[-1]
    if real:
        half = size // 2 + 1
        result = _with_length(lines, half)
        y = tf.signal.irfft(result, [size])[..., None]
    else:
        result = (tf.signal.ifft if inverse else tf.signal.fft)(_with_length(lines, size))
        y = _pairs(result[..., : size // 2 + 1] if onesided else result)
    return tf.cast(tf.transpose(y, [*order, x.shape.rank - 1]), x.dtype)


def _with_length(x, size):
    """Pad the end with zeros, or cut it."""
    missing = [(0, 0)] * (x.shape.rank - 1) + [(0, max(size - x.shape[-1], 0))]
    return tf.pad(x[..., :size], missing)


def _complex(x):
    return tf.complex(x[..., 0], x[..., 1] if x.shape[-1] == 2 else tf.zeros_like(x[..., 0]))


def _pairs(x):
    return tf.stack([tf.math.real(x), tf.math.imag(x)], -1)
