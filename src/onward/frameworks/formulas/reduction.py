"""Reductions along axes, plain and cumulative, in types for which ONNX Runtime has kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.frameworks.formulas.graph_building import cast

_WIDE = {ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16}


def widely(compute: Callable[..., Expr]) -> Callable[..., Expr]:
    """Return a formula for all types: those without a kernel in ONNX Runtime become int64."""

    def computed(op: Any, x: Expr, *rest: Any, **options: Any) -> Expr:
        if x.dtype in _WIDE or x.dtype is None or x.dtype.is_floating_point():
            return compute(op, x, *rest, **options)
        others = [cast(op, other, np.int64) if isinstance(other, Expr) else other for other in rest]
        return cast(op, compute(op, cast(op, x, np.int64), *others, **options), x.dtype)

    return computed


def where(op: Any, which: Expr, yes: Expr, no: Expr) -> Expr:
    """Return one of two, element by element. ONNX Runtime has no Where for booleans."""
    if yes.dtype is ir.DataType.BOOL:
        return op.Or(op.And(which, yes), op.And(op.Not(which), no))
    return _where(op, yes, no, which=which)


@widely
def _where(op: Any, yes: Expr, no: Expr, *, which: Expr) -> Expr:
    return op.Where(which, yes, no)


@widely
def reduce(op: Builder, x: Expr, operator: str, axes: Sequence[int], keepdims: bool = False) -> Expr:
    """Reduce along axes, if there are any. For booleans, ReduceMin is `all` and ReduceMax `any`."""
    if not axes and operator != "ReduceL2":  # which is the absolute value
        return x
    axes_or_none = None if axes else 1
    return op.node("", operator, x, list(axes), keepdims=int(keepdims), noop_with_empty_axes=axes_or_none)


def arg_reduce(op: Builder, x: Expr, operator: str, axis: int, dtype: Any) -> Expr:
    """Return the index of the largest (ArgMax) or smallest (ArgMin) element along an axis."""
    wide = x if x.dtype is None or x.dtype.is_floating_point() else cast(op, x, np.int64)
    return cast(op, op.node("", operator, wide, axis=axis, keepdims=0), dtype)


@widely
def cumulative_sum(op: Builder, x: Expr, axis: Expr, *, exclusive: bool = False, reverse: bool = False) -> Expr:
    return op.CumSum(x, axis, exclusive=int(exclusive), reverse=int(reverse))


def cumulative(
    op: Builder, x: Expr, first: Expr, axis: int, combine: Callable[..., Expr], shape: ir.Shape, reverse: bool = False
) -> Expr:
    """Scan along an axis: combine the state, at first `first`, with items of this shape."""

    def step(inner: Builder, before: Expr, item: Expr) -> tuple[Expr, Expr]:
        after = combine(inner, before, item)
        return after, after

    assert x.dtype is not None
    inputs = [ir.Value(name=name, type=ir.TensorType(x.dtype), shape=shape) for name in ("before", "item")]
    directions = [int(reverse)]
    _, result = op.Scan(
        first,
        x,
        outputs=2,
        body=op.subgraph(step, inputs),
        num_scan_inputs=1,
        scan_input_axes=[axis],
        scan_output_axes=[axis],
        scan_input_directions=directions,
        scan_output_directions=directions,
    )
    return result


def log_sum_exp(op: Builder, a: Expr, b: Expr) -> Expr:
    """Return log(exp(a) + exp(b)) of finite numbers, one of which may be -inf."""
    largest = op.Max(a, b)
    return largest + op.Log(op.Exp(a - largest) + op.Exp(b - largest))
