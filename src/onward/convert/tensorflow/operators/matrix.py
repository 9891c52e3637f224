"""Products of matrices."""

from __future__ import annotations

from onward.convert.tensorflow.graph import transposed
from onward.engines.framework import Operators

operators = Operators()


def _turned(op, x, rank):
    """The matrices of a batch, transposed."""
    return transposed(op, x, [*range(rank - 2), rank - 1, rank - 2])


@operators.define("MatMul")
def matmul(op, a, b, *, transpose_a, transpose_b):
    return (_turned(op, a, 2) if transpose_a else a) @ (_turned(op, b, 2) if transpose_b else b)


@operators.define("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batched(op, a, b, *, adj_x, adj_y, node):
    return (_turned(op, a, node.rank(0)) if adj_x else a) @ (_turned(op, b, node.rank(1)) if adj_y else b)


operators(Einsum=lambda op, *xs, equation: op.Einsum(*xs, equation=equation))
