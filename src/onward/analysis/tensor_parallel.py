"""Weights of matmuls that devices can divide so that few results must be summed.

The first matmul of a pair divides its columns, and so its output features. The second divides its
rows, and its output is a sum over devices. Examples are the two layers of an MLP, and the
projections before and after attention. Between them may stand any operator that treats features
independently. Batch sizes may be unknown.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

_ENDS = {
    "ArgMax", "ArgMin", "BatchNormalization", "Conv", "ConvTranspose", "GroupNormalization", "InstanceNormalization",
    "LayerNormalization", "NegativeLogLikelihoodLoss", "RMSNormalization", "Shape", "SimplifiedLayerNormalization",
    "Size", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "SoftmaxCrossEntropyLoss",
}  # fmt: skip
"""Operators that need all features, besides reductions."""
_SAME = ("Identity", "Cast")
"""Operators allowed between a weight and its matmul, besides Transpose."""


def divide_matmuls(graph: ir.Graph, devices: int) -> dict[str, int]:
    """Return the weights that `devices` devices divide among them, with the axis."""
    follower = _Follower(graph, devices)
    for node in graph:
        follower.follow(node)
    return follower.axes


class _Follower:
    def __init__(self, graph: ir.Graph, devices: int):
        self.axes: dict[str, int] = {}
        self._weights: Mapping[str, ir.Value] = graph.initializers
        self._devices = devices
        self._divided: set[ir.Value] = set()
        """Values whose features are divided."""

    def follow(self, node: ir.Node) -> None:
        if node.op_type in ("MatMul", "Gemm") and (weight := self._weight(node.inputs[1])) is not None:
            self._multiply(node, *weight)
        elif node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
            if (weight := self._weight(node.inputs[0])) is not None and not weight[1]:
                self._claim(weight[0], 0)  # rows of a table, each of which one device has
        elif (
            node.op_type not in _ENDS
            and not node.op_type.startswith("Reduce")
            and any(value in self._divided for value in node.inputs)
        ):
            self._divided.update(node.outputs)
            for value in node.inputs:
                self._claim_bias(value)

    def _multiply(self, node: ir.Node, weight: ir.Value, is_transposed: bool) -> None:
        columns = 0 if is_transposed != bool(node.attributes.get_int("transB", 0)) else 1
        if node.inputs[0] in self._divided:
            self._claim(weight, 1 - columns)
        elif self._claim(weight, columns):
            self._divided.update(node.outputs)
            if len(node.inputs) > 2:
                self._claim_bias(node.inputs[2])

    def _weight(self, value: ir.Value | None) -> tuple[ir.Value, bool] | None:
        """Return the matrix that a matmul reads, and True if it reads it transposed."""
        is_transposed = False
        while value is not None and (node := value.producer()) is not None:
            if node.op_type not in (*_SAME, "Transpose"):
                return None
            is_transposed ^= node.op_type == "Transpose"
            value = node.inputs[0]
        is_matrix = value is not None and value.name in self._weights and value.shape is not None
        return (value, is_transposed) if is_matrix and value is not None and len(value.shape or ()) == 2 else None

    def _claim_bias(self, value: ir.Value | None) -> None:
        if value is not None and value.name in self._weights and value.shape is not None and len(value.shape) == 1:
            self._claim(value, 0)

    def _claim(self, weight: ir.Value, axis: int) -> bool:
        """Divide a weight along an axis. Return False if it is divided along another, or cannot be."""
        size = weight.shape[axis] if weight.shape is not None else None
        if not isinstance(size, int) or size % self._devices:
            return False
        return self.axes.setdefault(weight.name or "", axis) == axis
