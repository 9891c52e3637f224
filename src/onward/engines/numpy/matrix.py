"""Products of matrices."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.precision import in_float32

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
