"""Products of matrices."""

from __future__ import annotations

import jax.numpy as jnp

from onward.engines.framework import Operators

operators = Operators()

_ALIGNED = 128
_LARGE = 1024


@operators.define("MatMul")
def matmul(a, b, *, aligned=False):
    """The product; `aligned`, with columns added for the while, where tensor cores need a round number of them."""
    columns = b.shape[-1]
    is_half = a.dtype == b.dtype and a.dtype in (jnp.bfloat16, jnp.float16)
    if not aligned or not is_half or b.ndim < 2 or columns < _LARGE or columns % 8 == 0:
        return jnp.matmul(a, b)
    more = [(0, 0)] * (b.ndim - 1) + [(0, -columns % _ALIGNED)]
    return jnp.matmul(a, jnp.pad(b, more))[..., :columns]


@operators.define("Gemm")
def gemm(a, b, c=None, *, alpha, beta, transA, transB, aligned=False):
    product = matmul(a.T if transA else a, b.T if transB else b, aligned=aligned)
    product = product if alpha == 1 else (alpha * product).astype(a.dtype)
    if c is None or beta == 0:
        return product
    return product + (c if beta == 1 else (beta * c).astype(a.dtype))


operators(
    Einsum=lambda *xs, equation: jnp.einsum(equation, *xs),
    Det=jnp.linalg.det,
)


@operators.define("onward.Linear")
def linear(x, weight, bias, *, aligned=False):
    return matmul(x, weight, aligned=aligned) + bias
