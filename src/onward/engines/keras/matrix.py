"""Products of matrices."""

from __future__ import annotations

from keras import ops

from onward.engines.framework import Operators

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
