"""Products of matrices."""

from __future__ import annotations

import jax.numpy as jnp

from onward.run.framework import Operators

operators = Operators()
operators(MatMul=jnp.matmul)


@operators.define("Gemm")
def gemm(a, b, c=None, *, alpha, beta, transA, transB):
    product = jnp.matmul(a.T if transA else a, b.T if transB else b)
    product = product if alpha == 1 else (alpha * product).astype(a.dtype)
    if c is None or beta == 0:
        return product
    return product + (c if beta == 1 else (beta * c).astype(a.dtype))


operators(
    Einsum=lambda *xs, equation: jnp.einsum(equation, *xs),
    Det=jnp.linalg.det,
)
operators.define("onward.Linear")(lambda x, weight, bias: jnp.matmul(x, weight) + bias)
