"""Matmuls and reductions."""

from __future__ import annotations

from keras import ops

from onward.engines.framework import Operators
from onward.engines.keras.types import available, dtype_of

operators = Operators()
operators(MatMul=ops.matmul)


@operators.define("Gemm")
def product(a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0):
    y = ops.matmul(ops.transpose(a) if transA else a, ops.transpose(b) if transB else b)
    y = y if alpha == 1 else alpha * y
    return y if c is None else y + (c if beta == 1 else beta * c)


@operators.define("Einsum")
def einsum(*xs, equation):
    return ops.einsum(equation.replace(" ", ""), *xs)


operators(Det=ops.det)


# ---- reduction -------------------------------------------------------------------------------------------------------


def reduce(function, x, axes, keepdims, noop_with_empty_axes):
    """Reduce over axes (default: all axes, or none with `noop_with_empty_axes`)."""
    rank = len(x.shape)
    if rank == 0 or (not axes and noop_with_empty_axes):
        return ops.cast(function(ops.expand_dims(x, 0), axis=0), dtype_of(x))
    return ops.cast(function(x, axis=tuple(axes or range(rank)), keepdims=bool(keepdims)), dtype_of(x))


@operators.define("ReduceSum")
def reduce_sum(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    return reduce(ops.sum, x, axes, keepdims, noop_with_empty_axes)


@operators.define("ReduceMean")
def reduce_mean(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    return reduce(ops.mean, x, axes, keepdims, noop_with_empty_axes)


@operators.define("ReduceMax")
def reduce_max(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    return reduce(ops.max, x, axes, keepdims, noop_with_empty_axes)


@operators.define("ReduceMin")
def reduce_min(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    return reduce(ops.min, x, axes, keepdims, noop_with_empty_axes)


@operators.define("ReduceProd")
def reduce_product(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    return reduce(ops.prod, x, axes, keepdims, noop_with_empty_axes)


@operators.define("ReduceL2")
def reduce_l2(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    """Return the 2-norm, with the slope 0 at 0."""
    squares = reduce(ops.sum, ops.square(x), axes, keepdims, noop_with_empty_axes)
    zero = squares == 0
    return ops.where(zero, ops.zeros_like(squares), ops.sqrt(ops.where(zero, ops.ones_like(squares), squares)))


@operators.define("ReduceLogSumExp")
def reduce_log_sum_exp(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
    return reduce(ops.logsumexp, x, axes, keepdims, noop_with_empty_axes)


def index_of(function, x, axis, keepdims, select_last_index):
    if select_last_index:
        index = x.shape[axis] - 1 - function(ops.flip(x, axis), axis)
    else:
        index = function(x, axis)
    index = ops.cast(index, available("int64"))
    return ops.expand_dims(index, axis) if keepdims else index


@operators.define("ArgMax")
def index_of_largest(x, *, axis=0, keepdims=1, select_last_index=0):
    return index_of(ops.argmax, x, axis, keepdims, select_last_index)


@operators.define("ArgMin")
def index_of_smallest(x, *, axis=0, keepdims=1, select_last_index=0):
    return index_of(ops.argmin, x, axis, keepdims, select_last_index)


def running(function, neutral, x, axis, exclusive, reverse):
    x = ops.flip(x, axis) if reverse else x
    if exclusive:
        axis %= len(x.shape)
        padded = ops.pad(x, [(int(i == axis), 0) for i in range(len(x.shape))], constant_values=neutral)
        x = padded[tuple(slice(None, -1 if i == axis else None) for i in range(len(x.shape)))]
    result = ops.cast(function(x, axis), dtype_of(x))
    return ops.flip(result, axis) if reverse else result


@operators.define("CumSum")
def running_sum(x, axis, *, exclusive=0, reverse=0):
    return running(ops.cumsum, 0, x, axis, exclusive, reverse)


@operators.define("CumProd")
def running_product(x, axis, *, exclusive=0, reverse=0):
    return running(ops.cumprod, 1, x, axis, exclusive, reverse)


@operators.define("TopK")
def top_k(x, k, *, axis=-1, largest=1, sorted=1):
    last, count = ops.moveaxis(x, axis, -1), k[0]
    values, indices = ops.top_k(last if largest else -last, count)
    values = values if largest else -values
    return ops.moveaxis(values, -1, axis), ops.cast(ops.moveaxis(indices, -1, axis), available("int64"))


# ---- Fourier transforms ----------------------------------------------------------------------------------------------


@operators.define("DFT")
def fourier(x, length=None, axis=None, *, inverse=0, onesided=0):
    """Return the DFT. The last axis is (real, imaginary), or real alone. A one-sided inverse transform is real."""
    index = (-2 if axis is None else axis) % len(x.shape)
    wide = ops.cast(x, available("float64"))  # as numpy computes it: terms that cancel leave little
    parts = [ops.moveaxis(wide[..., i], index, -1) for i in range(x.shape[-1])]
    real, imaginary = [*parts, ops.zeros_like(parts[0])][:2]
    count = real.shape[-1]
    size = length or (2 * (count - 1) if inverse and onesided else count)
    if onesided:
        results = [ops.irfft((real, imaginary), size)] if inverse else ops.rfft(real, size)
    else:
        ends = [(0, 0)] * (len(real.shape) - 1) + [(0, max(size - count, 0))]
        real, imaginary = (ops.pad(part[..., :size], ends) for part in (real, imaginary))
        if inverse:  # the transform of the conjugate, by exchanging the parts
            results = [part / size for part in reversed(ops.fft((imaginary, real)))]
        else:
            results = ops.fft((real, imaginary))
    return ops.cast(ops.stack([ops.moveaxis(part, -1, index) for part in results], -1), dtype_of(x))
