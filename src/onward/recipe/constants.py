"""Constants of a model as parameters: initializers and outputs of nodes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from onward.constants import constant_tensor, stored_tensor
from onward.model import Model
from onward.model.state import with_metadata
from onward.runtime.sessions import evaluate
from onward.standard import COMMON_OPSET, IR_VERSION
from onward.transform.quantized import open_weight

_BLOCK = 1 << 22
"""Elements that are read at a time."""


def stored_shape(value: ir.Value) -> tuple[int, ...] | None:
    if (tensor := constant_tensor(value)) is not None:
        return tuple(tensor.shape.numpy())
    return tuple(value.shape.numpy()) if value.shape is not None and value.shape.is_static() else None


def expose(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Make a parameter a plain initializer: not an input with a default, not in a node.

    If it is stored as integers, every step rounds it to integers.
    """
    if value in graph.inputs:
        graph.inputs.remove(value)
    if (node := value.producer()) is None:
        value.type = ir.TensorType(value.const_value.dtype)  # type: ignore[union-attr]
        value.shape = ir.Shape(value.const_value.shape.numpy())  # type: ignore[union-attr]
        return value
    name, stored = value.name or "", stored_tensor(value)
    tensor = _run(node) if stored is None else under_name(name, stored)
    if node.op_type == "DequantizeLinear":
        integers = constant_tensor(node.inputs[0])
        assert integers is not None
        return open_weight(graph, node, integers, tensor.numpy())
    exposed = ir.Value(name=name, type=ir.TensorType(tensor.dtype), const_value=tensor)
    exposed.shape = ir.Shape(tensor.shape.numpy())
    value.replace_all_uses_with(exposed, replace_graph_outputs=True)
    graph.remove(node)
    graph.register_initializer(exposed)
    return exposed


def is_uniform(array: np.ndarray) -> bool:
    """True if all elements are the same number. Stops reading at the first difference."""
    return bool(array.size) and all((block == array.flat[0]).all() for block in blocks(array))


def blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the numbers of an array in blocks; a repeated number comes once."""
    if array.ndim and not any(array.strides):
        array = array[(slice(1),) * array.ndim]
    flat = array.reshape(-1)
    return (flat[start : start + _BLOCK] for start in range(0, len(flat), _BLOCK))


def under_name(name: str | None, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Return the tensor under another name; the numbers are shared."""
    renamed = with_metadata(tensor, {})
    renamed.name = name
    return renamed


def _run(node: ir.Node) -> ir.Tensor:
    tensors = [constant_tensor(value) for value in node.inputs]
    values = [t if t is None else ir.Value(name=f"x{i}", const_value=t) for i, t in enumerate(tensors)]
    copy = ir.Node(node.domain, node.op_type, values, list(node.attributes.values()), name="node")
    copy.outputs[0].name = "y"
    copy.outputs[0].type = ir.TensorType(node.outputs[0].dtype or ir.DataType.FLOAT)
    opset = dict(node.graph.opset_imports) if node.graph is not None else {"": COMMON_OPSET}
    constants = [value for value in values if value is not None]
    graph = ir.Graph([], copy.outputs, nodes=[copy], initializers=constants, opset_imports=opset, name="constant")
    return ir.Tensor(evaluate(Model(ir.Model(graph, ir_version=IR_VERSION)))[0], name=node.outputs[0].name)


# ---- normalization of the input --------------------------------------------------------------------------------------


_MOVES = {"Cast", "Flatten", "Identity", "Reshape", "Resize", "Squeeze", "Transpose", "Unsqueeze"}
_SCALES = {"Div", "Mul"}


def normalizes_input(node: ir.Node, index: int) -> bool:
    """True if input `index` of a node is the mean or the deviation that normalizes a model input.

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
    is_factor = node.op_type == "Mul" or (node.op_type == "Div" and index == 1)
    return is_factor and constant_tensor(node.inputs[index]) is not None


def _is_fed(value: ir.Value | None) -> bool:
    """True if a value is a model input, possibly moved or scaled by a constant."""
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
