"""Normalization of data that a model does itself: (x - mean) / std, right behind an input."""

from __future__ import annotations

import onnx_ir as ir

from onward.constants import constant_tensor

_MOVES = {"Cast", "Flatten", "Identity", "Reshape", "Resize", "Squeeze", "Transpose", "Unsqueeze"}
_SCALES = {"Div", "Mul"}


def normalizes_input(node: ir.Node, index: int) -> bool:
    """Whether input `index` of a node is the mean or the deviation by which an input of the model is normalized.

    A difference alone does not tell: what is subtracted from an input can be learned.
    """
    if node.op_type == "Sub":
        scaled = [use for use in node.outputs[0].uses() if not _is_scale(use.node, 1 - use.idx)]
        return index == 1 and not scaled and bool(node.outputs[0].uses()) and _is_fed(node.inputs[0])
    if not _is_scale(node, index):
        return False
    difference = node.inputs[1 - index]
    before = difference.producer() if difference is not None else None
    is_difference = before is not None and before.op_type == "Sub" and constant_tensor(before.inputs[1]) is not None
    return is_difference and before is not None and _is_fed(before.inputs[0])


def _is_scale(node: ir.Node, index: int) -> bool:
    """Whether input `index` is a constant by which a node multiplies or divides."""
    is_factor = node.op_type == "Mul" or (node.op_type == "Div" and index == 1)
    return is_factor and constant_tensor(node.inputs[index]) is not None


def _is_fed(value: ir.Value | None) -> bool:
    """Whether a value is an input of the model, as it is, moved about or scaled by a constant."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type in _SCALES:
            steady = [i for i in (0, 1) if _is_scale(node, i)]
            if not steady:
                return False
            value = node.inputs[1 - steady[0]]
        elif node.op_type in _MOVES:
            value = node.inputs[0]
        else:
            return False
    return value is not None and value.is_graph_input() and constant_tensor(value) is None
