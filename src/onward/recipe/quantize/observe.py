"""Scales while a model is trained: observed batch by batch, learned, or fixed.

The inference graph reads scales and zero points that are state. A step measures the range of what is to be rounded,
without a gradient, and rounds with what follows from it; the state gets that. In the first batch there is nothing to go
on from, unless ranges were calibrated: its own range is taken then.
"""

from __future__ import annotations

import functools
import json

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.constants import constant_tensor
from onward.recipe.assembly import Assembly, moving_average
from onward.recipe.quantize.ranges import Rounding, parameters_of
from onward.recipe.quantize.settings import levels
from onward.recipe.stop_gradient import stop_gradient
from onward.transform.quantised import RANGE_KEY

BATCHES = "quantize/batches"
"""The state that counts batches whose ranges were measured."""


def observe(assembly: Assembly, node: ir.Node, new: dict[ir.Value, ir.Value]) -> None:
    """Add a QuantizeLinear in training mode: with the scale that its range in this batch leads to."""
    found = Rounding(node, json.loads(node.metadata_props[RANGE_KEY]))
    op = assembly.op.scoped(f"train/{node.name or node.op_type}")
    x, scale, zero = (op(new.get(value, value)) for value in (found.x, found.scale, found.zero))
    is_first = op.Equal(_count(assembly, found), np.int64(0))
    low, high = batch_range(op, op.call(stop_gradient, x).like(x.value), found.facts.get("percentile"))
    if found.facts["ranges"] == "moving":
        low, high = _average_range(assembly, op, found, low, high, is_first)
        scale, zero = parameters_of(op, low, high, found.dtype)
    else:
        first_scale, first_zero = parameters_of(op, low, high, found.dtype)
        scale, zero = op.Where(is_first, first_scale, scale), _where_integer(op, is_first, first_zero, zero)
    rounded = op.QuantizeLinear(x, scale, zero).named(f"train/{node.outputs[0].name}").like(node.outputs[0])
    new[node.outputs[0]] = rounded.value
    new[found.scale], new[found.zero] = scale.like(found.scale).value, zero.like(found.zero).value


def _count(assembly: Assembly, found: Rounding) -> Expr:
    if BATCHES not in assembly.values:
        zero = np.asarray(int(found.is_known), np.int64)
        count = assembly.state(BATCHES, ir.Tensor(zero), lambda op: op.Identity(zero), role="counter")
        assembly.update(BATCHES, count + 1)
    return assembly.op(assembly.values[BATCHES])


def batch_range(op: Builder, x: Expr, percentile: float | None) -> tuple[Expr, Expr]:
    """The least and largest number, or those beyond which only the rest of so many percent are."""
    if percentile is None:
        return op.ReduceMin(x, keepdims=0), op.ReduceMax(x, keepdims=0)
    flat = op.Reshape(x, np.asarray([-1], np.int64))
    last = op.Cast(op.Size(x) - 1, to=ir.DataType.DOUBLE)
    below = op.Cast(op.Floor(last * (percentile / 100)), to=ir.DataType.INT64)
    count = op.Reshape(op.Size(x) - below, np.asarray([1], np.int64))
    high, _ = op.TopK(flat, count, outputs=2, largest=1)
    low, _ = op.TopK(flat, count, outputs=2, largest=0)
    return op.ReduceMax(low, keepdims=0), op.ReduceMin(high, keepdims=0)


def _average_range(
    assembly: Assembly, op: Builder, found: Rounding, low: Expr, high: Expr, is_first: Expr
) -> tuple[Expr, Expr]:
    """The moving averages of both ends, which are state."""
    decay = op.constant(np.float64(found.facts["momentum"]))
    averages = []
    for name, number, known in zip(found.limits, (low, high), _known_range(found), strict=True):
        start = ir.Tensor(np.asarray(known, np.float32))
        state = assembly.state(name, start, functools.partial(_constant, start), role="statistics")
        old = op(state.value)
        average = op.Where(is_first, number, op.call(moving_average, old, number, decay).like(state.value))
        averages.append(average)
        assembly.update(assembly.values[name].name or "", average)
    return averages[0], averages[1]


def _constant(tensor: ir.Tensor, op: Builder) -> Expr:
    return op.constant(tensor)


def _known_range(found: Rounding) -> tuple[float, float]:
    """The range that the scale in the file stands for."""
    scale, zero = (constant_tensor(value) for value in (found.scale, found.zero))
    if not found.is_known or scale is None or zero is None:
        return 0.0, 0.0
    low, high = (level - float(zero.numpy().astype(np.float32)) for level in levels(found.dtype))
    return low * float(scale.numpy()), high * float(scale.numpy())


def _where_integer(op: Builder, condition: Expr, a: Expr, b: Expr) -> Expr:
    """Where of types that not every runtime chooses from: through integers of 32 bits."""
    wide = [op.Cast(expr, to=ir.DataType.INT32) for expr in (a, b)]
    chosen: Expr = op.Cast(op.Where(condition, *wide), to=b.dtype)
    return chosen
