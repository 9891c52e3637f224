"""`tf.nn.batch_normalization` with `tf.nn.moments`, which TensorFlow writes out, as the operator that it amounts to.

It is one only if its statistics are averaged: otherwise inference normalizes with those of the batch, too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onward.build import Builder
from onward.frameworks.formulas.graph_building import permute
from onward.frameworks.tensorflow.graph import Statistics


def replace_written_out(op: Builder, averaged: Collection[ir.Value]) -> list[Statistics]:
    """Replace batch normalizations that are written out and whose statistics are averaged."""
    found = []
    for root in [node for node in op.graph if node.op_type == "Add"]:
        match = _match(root, averaged)
        if match is not None:
            found.append(_replace(op, root.outputs[0], match))
    return found


class _Parts(NamedTuple):
    x: ir.Value
    scale: ir.Value
    bias: ir.Value
    mean: ir.Value
    variance: ir.Value
    epsilon: float
    axis: int
    """Where the channels are."""


def _match(root: ir.Node, averaged: Collection[ir.Value]) -> _Parts | None:
    """The parts of `x * k + (bias - mean * k)`, where k is `rsqrt(variance + epsilon) * scale`."""
    product, rest = (_producer(x, kind) for x, kind in zip(root.inputs, ("Mul", "Sub"), strict=True))
    shift = rest and _producer(rest.inputs[1], "Mul")
    if not (product and rest and shift) or product.inputs[1] is not shift.inputs[1]:
        return None
    slope = _producer(shift.inputs[1], "Mul")
    inverse = slope and _producer(slope.inputs[0], "Reciprocal")
    root_of = inverse and _producer(inverse.inputs[0], "Sqrt")
    widened = root_of and _producer(root_of.inputs[0], "Add")
    epsilon = widened and _producer(widened.inputs[1], "Constant")
    if not (slope and widened and epsilon):
        return None
    vectors = (slope.inputs[1], rest.inputs[0], shift.inputs[0], widened.inputs[0])
    scale, bias, mean, variance = (_vector(value) for value in vectors)
    x, axis = product.inputs[0], _channels(slope.outputs[0])
    if not (x and scale and bias and mean and variance) or axis is None or not {mean, variance} <= set(averaged):
        return None
    number = float(epsilon.attributes["value"].as_tensor().numpy())
    return _Parts(x, scale, bias, mean, variance, number, axis)


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None


def _vector(value: ir.Value | None) -> ir.Value | None:
    """A number for each channel, which may have got axes of size 1 to fit images."""
    node = _producer(value, "Reshape")
    value = value if node is None else node.inputs[0]
    return value if value is not None and value.shape is not None and value.shape.rank() == 1 else None


def _channels(slope: ir.Value) -> int | None:
    """The axis, from the end, along which there is a number for each channel."""
    sizes = [] if slope.shape is None else list(slope.shape)
    wide = [axis - len(sizes) for axis, size in enumerate(sizes) if size != 1]
    return wide[0] if len(wide) == 1 else -1 if sizes and not wide else None


def _replace(op: Builder, y: ir.Value, parts: _Parts) -> Statistics:
    assert y.shape is not None
    rank, unknown = y.shape.rank(), op.constant(np.zeros(1, np.float32))  # until it is known what averages it
    order = list(range(rank))
    order.insert(1, order.pop(parts.axis))
    images = permute(op, op(parts.x), order)
    made = op.BatchNormalization(images, parts.scale, parts.bias, unknown, unknown, epsilon=parts.epsilon)
    result = permute(op, made, [order.index(axis) for axis in range(rank)])
    y.replace_all_uses_with(result.like(y).value, replace_graph_outputs=True)
    node = made.value.producer()
    assert node is not None
    return Statistics(node, (parts.mean, parts.variance), sample=False)
