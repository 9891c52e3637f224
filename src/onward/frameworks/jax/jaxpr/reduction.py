"""Reductions along axes, cumulative reductions, and sorting."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.engines.framework import Operators
from onward.errors import UnsupportedError
from onward.frameworks.formulas.graph_building import cast
from onward.frameworks.jax.jaxpr.emitter import declare_value, extreme, fill, widely

primitives = Operators()


def _reduction_rule(operator):
    """A reduction. Truth values and small integers are counted in 64 bits."""

    @widely
    def reduced(op, x, axes):
        return getattr(op, operator)(x, axes, keepdims=0) if axes else x

    return lambda op, x, *, axes: reduced(op, x, list(axes))


primitives(
    reduce_sum=_reduction_rule("ReduceSum"),
    reduce_prod=_reduction_rule("ReduceProd"),
    reduce_max=_reduction_rule("ReduceMax"),
    reduce_min=_reduction_rule("ReduceMin"),
    reduce_or=_reduction_rule("ReduceMax"),
    reduce_and=_reduction_rule("ReduceMin"),
)


def _collective_rule(operator):
    """A reduction over an axis that `vmap` gave a name; nothing here lives on several devices."""
    reduced = _reduction_rule(operator)

    def collected(op, *xs, axes, axis_index_groups):
        if axis_index_groups is not None or any(isinstance(axis, str) for axis in axes):
            raise UnsupportedError("it is about several devices, or groups of them")
        return [reduced(op, x, axes=axes) for x in xs]

    return collected


primitives(psum=_collective_rule("ReduceSum"), pmax=_collective_rule("ReduceMax"), pmin=_collective_rule("ReduceMin"))


@primitives.define("reduce_xor")
def reduce_xor(op, x, *, axes):
    """Of truth values: whether an odd number of them is true."""
    count = op.ReduceSum(cast(op, x, np.int64), list(axes), keepdims=0)
    return op.Equal(op.Mod(count, 2), 1)


def _position(operator):
    def position(op, x, *, axes, index_dtype):
        wide = x if x.dtype.is_floating_point() else cast(op, x, np.int64)
        return cast(op, getattr(op, operator)(wide, axis=axes[0], keepdims=0), index_dtype)

    return position


primitives(argmax=_position("ArgMax"), argmin=_position("ArgMin"))


# ---- cumulative ------------------------------------------------------------------------------------------------------


@widely
def _cumsum(op, x, axis, reverse):
    return op.CumSum(x, op.constant(np.int64(axis)), reverse=int(reverse))


primitives(cumsum=lambda op, x, *, axis, reverse: _cumsum(op, x, axis, reverse))


def _scan_rule(combine, start):
    """A Scan along the axis that combines what was with what comes; `start(dtype)` changes nothing."""

    def scanned(op, x, *, axis, reverse, ins):
        rest = [size for i, size in enumerate(ins[0].shape) if i != axis]
        sort = ir.TensorType(x.dtype)

        def step(inner, before, item):
            after = combine(inner, before, item)
            return after, after

        shape = ir.Shape([size if isinstance(size, int) else str(size) for size in rest])
        body = op.subgraph(step, [ir.Value(name=name, type=sort, shape=shape) for name in ("before", "item")])
        first = fill(op, rest, start(ins[0].dtype), ins[0].dtype)
        way = [int(reverse)]
        _, result = op.Scan(
            first,
            x,
            outputs=2,
            body=body,
            num_scan_inputs=1,
            scan_input_axes=[axis],
            scan_output_axes=[axis],
            scan_input_directions=way,
            scan_output_directions=way,
        )
        return result.like(declare_value(ins[0]))

    return scanned


def _log_of_sum(op, a, b):
    largest = op.Max(a, b)
    return largest + op.Log(op.Exp(a - largest) + op.Exp(b - largest))


primitives(
    cumprod=_scan_rule(lambda op, a, b: a * b, lambda dtype: 1),
    cummax=_scan_rule(lambda op, a, b: op.Max(a, b), lambda dtype: extreme(dtype, largest=False)),
    cummin=_scan_rule(lambda op, a, b: op.Min(a, b), lambda dtype: extreme(dtype, largest=True)),
    cumlogsumexp=_scan_rule(_log_of_sum, lambda dtype: np.finfo(dtype).min),
)


# ---- sorting ---------------------------------------------------------------------------------------------------------


@primitives.define("sort")
def sort(op, *xs, dimension, num_keys, ins):
    """By the last key first: TopK leaves what is equal in its order, so that earlier keys count for more."""
    size = op.shape([ins[0].shape[dimension]])
    for key in reversed(range(num_keys)):
        _, order = op.TopK(_comparable(op, xs[key]), size, axis=dimension, largest=0, sorted=1, outputs=2)
        xs = tuple(op.GatherElements(x, order, axis=dimension) for x in xs)
    return xs


@primitives.define("top_k")
def top_k(op, x, *, k, axis):
    _, places = op.TopK(_comparable(op, x), op.shape([k]), axis=axis, largest=1, sorted=1, outputs=2)
    return op.GatherElements(x, places, axis=axis), cast(op, places, np.int32)


def _comparable(op, x):
    """In a type that ONNX Runtime sorts."""
    if x.dtype is ir.DataType.UINT64:
        raise UnsupportedError("unsigned numbers of 64 bits have no order in ONNX Runtime")
    return x if x.dtype.is_floating_point() or x.dtype is ir.DataType.INT32 else cast(op, x, np.int64)
