"""Products of matrices."""

from __future__ import annotations

from onward.engines.framework import Operators
from onward.frameworks.formulas.graph_building import permute

operators = Operators()


def _transpose(op, x, rank):
    """The matrices of a batch, transposed."""
    return permute(op, x, [*range(rank - 2), rank - 1, rank - 2])


@operators.define("MatMul")
def matmul(op, a, b, *, transpose_a, transpose_b):
    return (_transpose(op, a, 2) if transpose_a else a) @ (_transpose(op, b, 2) if transpose_b else b)


@operators.define("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batch_matmul(op, a, b, *, adj_x, adj_y, node):
    return (_transpose(op, a, node.rank(0)) if adj_x else a) @ (_transpose(op, b, node.rank(1)) if adj_y else b)


operators(Einsum=lambda op, *xs, equation: op.Einsum(*xs, equation=equation))
