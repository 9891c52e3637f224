"""Reductions along axes, cumulative reductions, and sorting."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.engines.framework import Operators
from onward.errors import UnsupportedError
from onward.frameworks.formulas.graph_building import cast
from onward.frameworks.formulas.reduction import arg_reduce, cumulative, cumulative_sum, log_sum_exp, reduce
from onward.frameworks.jax.jaxpr.builder import declare_value, extreme, fill

primitives = Operators()


def _reduction_rule(operator):
    return lambda op, x, *, axes: reduce(op, x, operator, axes)


primitives(
    reduce_sum=_reduction_rule("ReduceSum"),
    reduce_prod=_reduction_rule("ReduceProd"),
    reduce_max=_reduction_rule("ReduceMax"),
    reduce_min=_reduction_rule("ReduceMin"),
    reduce_or=_reduction_rule("ReduceMax"),
    reduce_and=_reduction_rule("ReduceMin"),
)


def _collective_rule(operator):
    """Return the row of a reduction over an axis that `vmap` named."""
    reduced = _reduction_rule(operator)

    def collected(op, *xs, axes, axis_index_groups):
        if axis_index_groups is not None or any(isinstance(axis, str) for axis in axes):
            raise UnsupportedError("it reduces over several devices")
        return [reduced(op, x, axes=axes) for x in xs]

    return collected


primitives(psum=_collective_rule("ReduceSum"), pmax=_collective_rule("ReduceMax"), pmin=_collective_rule("ReduceMin"))


@primitives.define("reduce_xor")
def reduce_xor(op, x, *, axes):
    """Return True where an odd number of booleans is true."""
    count = op.ReduceSum(cast(op, x, np.int64), list(axes), keepdims=0)
    return op.Equal(op.Mod(count, 2), 1)


def _index_rule(operator):
    return lambda op, x, *, axes, index_dtype: arg_reduce(op, x, operator, axes[0], index_dtype)


primitives(argmax=_index_rule("ArgMax"), argmin=_index_rule("ArgMin"))


def _scan_rule(combine, start):
    """Return the row of a cumulative reduction whose neutral element is `start(dtype)`."""

    def scanned(op, x, *, axis, reverse, ins):
        rest = [size for i, size in enumerate(ins[0].shape) if i != axis]
        shape = ir.Shape([size if isinstance(size, int) else str(size) for size in rest])
        first = fill(op, rest, start(ins[0].dtype), ins[0].dtype)
        return cumulative(op, x, first, axis, combine, shape, reverse).like(declare_value(ins[0]))

    return scanned


primitives(
    cumsum=lambda op, x, *, axis, reverse: cumulative_sum(op, x, op.constant(np.int64(axis)), reverse=reverse),
    cumprod=_scan_rule(lambda op, a, b: a * b, lambda dtype: 1),
    cummax=_scan_rule(lambda op, a, b: op.Max(a, b), lambda dtype: extreme(dtype, largest=False)),
    cummin=_scan_rule(lambda op, a, b: op.Min(a, b), lambda dtype: extreme(dtype, largest=True)),
    cumlogsumexp=_scan_rule(log_sum_exp, lambda dtype: np.finfo(dtype).min),
)


@primitives.define("sort")
def sort(op, *xs, dimension, num_keys, ins):
    """Sort by the last key first: TopK is stable, so earlier keys count more."""
    size = op.shape([ins[0].shape[dimension]])
    for key in reversed(range(num_keys)):
        _, order = op.TopK(_comparable(op, xs[key]), size, axis=dimension, largest=0, sorted=1, outputs=2)
        xs = tuple(op.GatherElements(x, order, axis=dimension) for x in xs)
    return xs


@primitives.define("top_k")
def top_k(op, x, *, k, axis):
    _, indices = op.TopK(_comparable(op, x), op.shape([k]), axis=axis, largest=1, sorted=1, outputs=2)
    return op.GatherElements(x, indices, axis=axis), cast(op, indices, np.int32)


def _comparable(op, x):
    """Cast to a type that ONNX Runtime sorts."""
    if x.dtype is ir.DataType.UINT64:
        raise UnsupportedError("ONNX Runtime cannot sort uint64")
    return x if x.dtype.is_floating_point() or x.dtype is ir.DataType.INT32 else cast(op, x, np.int64)
