"""`tf.nn.batch_normalization` with `tf.nn.moments`, which TensorFlow writes out, as the operator that it amounts to.

It is one only if its statistics are averaged: otherwise inference normalizes with those of the batch, too.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder
from onward.convert.tensorflow.graph import Statistics, transposed


def written_out(op: Builder, averaged: Container[ir.Value]) -> list[Statistics]:
    """Replace batch normalizations that are written out and whose statistics are averaged."""
    found = []
    for root in [node for node in op.graph if node.op_type == "Add"]:
        match = _match(root, averaged)
        if match is not None:
            found.append(_replaced(op, root.outputs[0], *match))
    return found


def _match(root: ir.Node, averaged: Container[ir.Value]) -> tuple[Any, ...] | None:
    """The parts of `x * k + (bias - mean * k)`, where k is `rsqrt(variance + epsilon) * scale`."""
    product, rest = (_producer(x, kind) for x, kind in zip(root.inputs, ("Mul", "Sub"), strict=True))
    shift = rest and _producer(rest.inputs[1], "Mul")
    if not (product and rest and shift) or product.inputs[1] is not shift.inputs[1]:
        return None
    x, mean, slope = product.inputs[0], shift.inputs[0], _producer(shift.inputs[1], "Mul")
    inverse = slope and _producer(slope.inputs[0], "Reciprocal")
    root_of = inverse and _producer(inverse.inputs[0], "Sqrt")
    widened = root_of and _producer(root_of.inputs[0], "Add")
    epsilon = widened and _producer(widened.inputs[1], "Constant")
    if not (slope and widened and epsilon) or mean not in averaged or widened.inputs[0] not in averaged:
        return None
    number = float(epsilon.attributes["value"].as_tensor().numpy())
    return x, slope.inputs[1], rest.inputs[0], mean, widened.inputs[0], number


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None


def _replaced(
    op: Builder,
    y: ir.Value,
    x: ir.Value,
    scale: ir.Value,
    bias: ir.Value,
    mean: ir.Value,
    variance: ir.Value,
    epsilon: float,
) -> Statistics:
    assert y.shape is not None
    rank = y.shape.rank()
    unknown = [op.constant(np.zeros(1, np.float32)) for _ in range(2)]  # until it is known what averages them
    first = transposed(op, op(x), [0, rank - 1, *range(1, rank - 1)])
    made = op.BatchNormalization(first, scale, bias, *unknown, epsilon=epsilon)
    last = transposed(op, made, [0, *range(2, rank), 1]).like(y)
    y.replace_all_uses_with(last.value, replace_graph_outputs=True)
    node = made.value.producer()
    assert node is not None
    return Statistics(node, (mean, variance), sample=False)
