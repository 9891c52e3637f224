"""Products of matrices."""

from __future__ import annotations

import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.tensorflow.tensors import FLOATS, SMALL, UNSIGNED, compute_as

operators = Operators()

_INTEGERS = SMALL | UNSIGNED


@operators.define("MatMul")
def matmul(a, b):
    """A vector is a row on the left side, a column on the right."""
    left = a[None] if a.shape.rank == 1 else a
    right = b[:, None] if b.shape.rank == 1 else b
    product = compute_as(tf.matmul, _INTEGERS)(left, right)
    gone = [axis for axis, x in ((-2, a), (-1, b)) if x.shape.rank == 1]
    return tf.squeeze(product, gone) if gone else product


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
