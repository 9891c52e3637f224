"""Which weights of products can be divided among devices, so that few results must be put together.

The first product of a pair divides its columns, and so the features of what it makes; the second its rows, and what it
makes is a sum over devices, whole again: the two layers of an MLP, or the projections before and after attention. What
is between them may be any operator that leaves features apart. Sizes of batches need not be known.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

_ENDS = {
    "ArgMax", "ArgMin", "BatchNormalization", "Conv", "ConvTranspose", "GroupNormalization", "InstanceNormalization",
    "LayerNormalization", "NegativeLogLikelihoodLoss", "RMSNormalization", "Shape", "SimplifiedLayerNormalization",
    "Size", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "SoftmaxCrossEntropyLoss",
}  # fmt: skip
"""Operators that need all features. Reductions do, too."""
_SAME = ("Identity", "Cast")
"""What may stand between a weight and its product, beside a Transpose."""


def divide_products(graph: ir.Graph, devices: int) -> dict[str, int]:
    """The weights that so many devices divide among them, and the axis along which they do."""
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
        if node.op_type in ("MatMul", "Gemm") and (found := self._weight(node.inputs[1])) is not None:
            self._multiply(node, *found)
        elif node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
            if (found := self._weight(node.inputs[0])) is not None and not found[1]:
                self._claim(found[0], 0)  # rows of a table, each of which one device has
        elif (
            node.op_type not in _ENDS
            and not node.op_type.startswith("Reduce")
            and any(value in self._divided for value in node.inputs)
        ):
            self._divided.update(node.outputs)
            for value in node.inputs:
                self._claim_bias(value)

    def _multiply(self, node: ir.Node, weight: ir.Value, turned: bool) -> None:
        columns = 0 if turned != bool(node.attributes.get_int("transB", 0)) else 1
        if node.inputs[0] in self._divided:
            self._claim(weight, 1 - columns)
        elif self._claim(weight, columns):
            self._divided.update(node.outputs)
            if len(node.inputs) > 2:
                self._claim_bias(node.inputs[2])

    def _weight(self, value: ir.Value | None) -> tuple[ir.Value, bool] | None:
        """The matrix that a product reads, and whether it reads it transposed."""
        turned = False
        while value is not None and (node := value.producer()) is not None:
            if node.op_type not in (*_SAME, "Transpose"):
                return None
            turned ^= node.op_type == "Transpose"
            value = node.inputs[0]
        is_matrix = value is not None and value.name in self._weights and value.shape is not None
        return (value, turned) if is_matrix and value is not None and len(value.shape or ()) == 2 else None

    def _claim_bias(self, value: ir.Value | None) -> None:
        if value is not None and value.name in self._weights and value.shape is not None and len(value.shape) == 1:
            self._claim(value, 0)

    def _claim(self, weight: ir.Value, axis: int) -> bool:
        """Divide a weight along an axis, unless it is divided along another, or cannot be."""
        size = weight.shape[axis] if weight.shape is not None else None
        if not isinstance(size, int) or size % self._devices:
            return False
        return self.axes.setdefault(weight.name or "", axis) == axis
