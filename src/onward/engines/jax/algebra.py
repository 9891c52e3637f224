"""Matmuls and reductions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.engines.framework import Operators
from onward.engines.shared.algebra import index_of, reduction, running
from onward.engines.shared.arrays import is_float

operators = Operators()

_ALIGNED = 128
_LARGE = 1024


@operators.define("MatMul")
def matmul(a, b, *, aligned=False):
    """Return the matmul. With `aligned`, pad columns to a multiple that tensor cores need."""
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


operators(Einsum=lambda *xs, equation: jnp.einsum(equation, *xs), Det=jnp.linalg.det)


@operators.define("onward.Linear")
def linear(x, weight, bias, *, aligned=False):
    return matmul(x, weight, aligned=aligned) + bias


# ---- reductions ------------------------------------------------------------------------------------------------------

operators(
    ReduceMax=reduction(lambda x, **options: jnp.max(x, initial=_smallest(x) if x.size == 0 else None, **options)),
    ReduceMin=reduction(lambda x, **options: jnp.min(x, initial=_largest(x) if x.size == 0 else None, **options)),
    ReduceLogSumExp=reduction(jax.nn.logsumexp),
)


def _position(find):
    """Return a function of 32-bit indices, as 64: users may lower a step where JAX has no 64-bit types."""

    def position(x, axis, *, keepdims):
        index = find(x, axis % x.ndim, np.int32).astype(np.int64)
        return jnp.expand_dims(index, axis % x.ndim) if keepdims else index

    return position


operators(ArgMax=index_of(_position(lax.argmax)), ArgMin=index_of(_position(lax.argmin)))


def _largest(x):
    if is_float(x.dtype):
        return jnp.inf
    return x.dtype.type(x.dtype == bool or jnp.iinfo(x.dtype).max)


def _smallest(x):
    if is_float(x.dtype):
        return -jnp.inf
    return x.dtype.type(x.dtype != bool and jnp.iinfo(x.dtype).min)


operators(CumSum=running(lax.cumsum, 0), CumProd=running(lax.cumprod, 1))


@operators.define("TopK")
def top_k(x, k, *, axis, largest, sorted):
    count = np.asarray(k).item()
    last = jnp.moveaxis(x, axis, -1)
    if largest:
        values, indices = lax.top_k(last, count)
    else:
        indices = jnp.argsort(last, -1, stable=True)[..., :count]
        values = jnp.take_along_axis(last, indices, -1)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis).astype(np.int64)
