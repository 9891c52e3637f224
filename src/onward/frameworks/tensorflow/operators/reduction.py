"""Reductions, cumulative sums, and selection by order."""

from __future__ import annotations

from onward.engines.framework import Operators
from onward.frameworks.formulas.graph_building import cast
from onward.frameworks.formulas.reduction import arg_reduce, cumulative_sum, reduce
from onward.frameworks.tensorflow.graph import as_int64, dtype_of

operators = Operators()


def _reduction_rule(operator):
    return lambda op, x, _, *, keep_dims, node: reduce(op, x, operator, node.numbers(1), keep_dims)


operators(
    Sum=_reduction_rule("ReduceSum"),
    Mean=_reduction_rule("ReduceMean"),
    Max=_reduction_rule("ReduceMax"),
    Min=_reduction_rule("ReduceMin"),
    Prod=_reduction_rule("ReduceProd"),
    EuclideanNorm=_reduction_rule("ReduceL2"),
    All=_reduction_rule("ReduceMin"),
    Any=_reduction_rule("ReduceMax"),
)


def _index_rule(operator):
    return lambda op, x, _, *, output_type, node: arg_reduce(op, x, operator, node.number(1), dtype_of(output_type))


operators(
    ArgMax=_index_rule("ArgMax"),
    ArgMin=_index_rule("ArgMin"),
    Cumsum=lambda op, x, axis, *, exclusive, reverse: cumulative_sum(
        op, x, as_int64(op, axis), exclusive=exclusive, reverse=reverse
    ),
)


@operators.define("TopKV2")
def top_k(op, x, k, *, sorted, index_type):
    values, indices = op.TopK(x, op.Reshape(as_int64(op, k), [1]), axis=-1, sorted=int(sorted), outputs=2)
    return values, cast(op, indices, dtype_of(index_type))
