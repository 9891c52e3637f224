"""Products of matrices."""

from __future__ import annotations

import string

from onward.engines.framework import Operators
from onward.frameworks.formulas.graph_building import cast, permute
from onward.frameworks.jax.jaxpr.values import widely

primitives = Operators()


@primitives.define("dot_general")
def dot_general(op, a, b, *, dimension_numbers, ins, outs):
    """Gemm for two matrices, of which it transposes both for nothing; MatMul where axes lie well; Einsum otherwise."""
    a, b = (cast(op, x, outs[0].dtype) for x in (a, b))
    return _product(op, a, b, dimension_numbers=dimension_numbers, ranks=(len(ins[0].shape), len(ins[1].shape)))


@widely
def _product(op, a, b, *, dimension_numbers, ranks):
    (summed_a, summed_b), (batch_a, batch_b) = dimension_numbers
    # ONNX Runtime gets MatMul of a vector wrong where it takes a Transpose before it along: no vectors.
    if len(summed_a) != 1 or 1 in ranks or batch_a != tuple(range(len(batch_a))) or batch_b != batch_a:
        return _einsum(op, a, b, dimension_numbers, ranks)
    (k_a,), (k_b,), batch = summed_a, summed_b, len(batch_a)
    if ranks == (2, 2) and not batch and a.dtype.is_floating_point():
        flipped = k_a == 0, k_b == 1
        return op.Gemm(a, b, transA=int(flipped[0]), transB=int(flipped[1])) if any(flipped) else a @ b
    if ranks[1] == batch + 2 and (ranks[0] == batch + 2 or not batch):
        return permute(op, a, _moved_order(ranks[0], k_a, ranks[0] - 1)) @ permute(
            op, b, _moved_order(ranks[1], k_b, batch)
        )
    return _einsum(op, a, b, dimension_numbers, ranks)


def _moved_order(rank, axis, place):
    """An order of axes in which one has moved to another place."""
    order = [other for other in range(rank) if other != axis]
    return [*order[:place], axis, *order[place:]]


def _einsum(op, a, b, dimension_numbers, ranks):
    (summed_a, summed_b), (batch_a, batch_b) = dimension_numbers
    letters = iter(string.ascii_letters)
    terms = [next(letters) for _ in range(ranks[0])], [next(letters) for _ in range(ranks[1])]
    for axis_a, axis_b in zip((*summed_a, *batch_a), (*summed_b, *batch_b), strict=True):
        terms[1][axis_b] = terms[0][axis_a]
    batch = [terms[0][axis] for axis in batch_a]
    free_a = [terms[0][axis] for axis in range(ranks[0]) if axis not in (*summed_a, *batch_a)]
    free_b = [terms[1][axis] for axis in range(ranks[1]) if axis not in (*summed_b, *batch_b)]
    equation = f"{''.join(terms[0])},{''.join(terms[1])}->{''.join([*batch, *free_a, *free_b])}"
    return op.Einsum(a, b, equation=equation)
