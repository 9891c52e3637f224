"""Reductions, sums along an axis, and selection by order."""

from __future__ import annotations

import onnx_ir as ir

from onward.engines.framework import Operators
from onward.frameworks.formulas.graph_building import cast
from onward.frameworks.tensorflow.graph import as_int64, dtype_of

operators = Operators()

INT32 = ir.DataType.INT32


def _reduction(name):
    def reduced(op, x, _, *, keep_dims, node):
        axes = node.numbers(1)
        return op.node("", name, x, axes, keepdims=int(keep_dims), noop_with_empty_axes=None if axes else 1)

    return reduced


def _of_truth(name):
    """All and Any, as the smallest and the largest of 0 and 1."""
    reduce = _reduction(name)

    def reduced(op, x, axes, *, keep_dims, node):
        return op.Cast(reduce(op, op.Cast(x, to=INT32), axes, keep_dims=keep_dims, node=node), to=ir.DataType.BOOL)

    return reduced


operators(
    Sum=_reduction("ReduceSum"),
    Mean=_reduction("ReduceMean"),
    Max=_reduction("ReduceMax"),
    Min=_reduction("ReduceMin"),
    Prod=_reduction("ReduceProd"),
    EuclideanNorm=_reduction("ReduceL2"),
    All=_of_truth("ReduceMin"),
    Any=_of_truth("ReduceMax"),
)


def _position(name):
    def position(op, x, _, *, output_type, node):
        found = op.node("", name, x, axis=node.number(1), keepdims=0)
        return cast(op, found, dtype_of(output_type))

    return position


operators(ArgMax=_position("ArgMax"), ArgMin=_position("ArgMin"))


@operators.define("Cumsum")
def cumulative_sum(op, x, axis, *, exclusive, reverse):
    return op.CumSum(x, as_int64(op, axis), exclusive=int(exclusive), reverse=int(reverse))


@operators.define("TopKV2")
def top_k(op, x, k, *, sorted, index_type):
    values, places = op.TopK(x, op.Reshape(as_int64(op, k), [1]), axis=-1, sorted=int(sorted), outputs=2)
    return values, cast(op, places, dtype_of(index_type))
