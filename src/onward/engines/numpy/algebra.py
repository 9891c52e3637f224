"""Matmuls and reductions."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.types import highest, in_float32, lowest, widen
from onward.engines.shared.algebra import reduction
from onward.engines.shared.arrays import is_float

operators = Operators()


@operators.define("MatMul")
@in_float32
def matmul(a, b):
    return np.matmul(a, b)


@operators.define("Gemm")
@in_float32
def gemm(a, b, c=None, *, alpha, beta, transA, transB):
    y = (a.T if transA else a) @ (b.T if transB else b)
    y = y if alpha == 1 else (alpha * y).astype(a.dtype)
    return y if c is None else y + (c if beta == 1 else (beta * c).astype(a.dtype))


@operators.define("Einsum")
@in_float32
def einsum(first, *others, equation):
    return np.einsum(equation, first, *others, optimize=True)


@operators.define("Det")
@in_float32
def det(x):
    return np.linalg.det(x)


# ---- reductions ------------------------------------------------------------------------------------------------------


def _log_sum_exp(x, axis, keepdims):
    y = x if is_float(x.dtype) else x.astype(np.float64)
    top = np.max(y, axis, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0)  # infinities less themselves would be NaN
    result = np.log(np.sum(np.exp(y - top), axis, keepdims=True)) + top
    return result if keepdims else np.squeeze(result, axis)


operators(
    ReduceMax=in_float32(reduction(lambda x, **options: np.max(x, initial=lowest(x.dtype), **options))),
    ReduceMin=in_float32(reduction(lambda x, **options: np.min(x, initial=highest(x.dtype), **options))),
    ReduceLogSumExp=in_float32(reduction(_log_sum_exp)),
)


@operators.define("TopK")
def top_k(x, k, *, axis, largest, sorted):
    """Return the top k, always sorted. Of equal elements the first comes first."""
    keys = widen(x)
    if largest:
        order = x.shape[axis] - 1 - np.flip(np.argsort(np.flip(keys, axis), axis, kind="stable"), axis)
    else:
        order = np.argsort(keys, axis, kind="stable")
    order = order.take(range(k.item()), axis)
    return np.take_along_axis(x, order, axis), order
