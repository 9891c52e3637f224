"""Constants: the tensor of an initializer or a Constant node."""

from __future__ import annotations

from itertools import chain

import numpy as np
import onnx_ir as ir

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""The floating-point types of 16 bits."""
_NUMBERS = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer or of a Constant node's output.

    `onnx_ir`'s own function renames the tensor and raises other errors for broken nodes.
    """
    if value is None:
        return None
    return value.const_value if value.const_value is not None else tensor_in(value.producer())


def constant_number(value: ir.Value | None) -> float | None:
    """Return the number in a constant of one element, else None."""
    tensor = constant_tensor(value)
    return float(tensor.numpy().reshape(())) if tensor is not None and tensor.size == 1 else None


def is_relu6(low: ir.Value | None, high: ir.Value | None) -> bool:
    """True if a Clip with these bounds is a ReLU6, whose slope at both bounds is 0 and not 1.

    ONNX has no ReLU6: exporters write a Clip from 0 to 6, and little else has these bounds.
    """
    tensor = constant_tensor(low)
    is_float = tensor is not None and tensor.dtype.is_floating_point()
    return is_float and constant_number(low) == 0 and constant_number(high) == 6


def tensor_in(node: ir.Node | None) -> ir.TensorProtocol | None:
    """Return the tensor of a Constant node, or of its numeric attributes; else None."""
    if node is None or node.op_type != "Constant" or any(attribute.is_ref() for attribute in node.attributes.values()):
        return None
    if "value" in node.attributes:
        return node.attributes["value"].as_tensor()
    fields = [(name, dtype) for name, dtype in _NUMBERS.items() if name in node.attributes]
    return ir.Tensor(np.array(node.attributes[fields[0][0]].value, fields[0][1])) if fields else None


def add_initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol | np.ndarray) -> ir.Value:
    """Add a tensor as an initializer of a graph; an array becomes a tensor named `name`."""
    if isinstance(tensor, np.ndarray):
        tensor = ir.Tensor(tensor, name=name)
    value_type, shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
    value = ir.Value(name=name, type=value_type, shape=shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def stored_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return a value as a tensor if nothing must be computed; a repeated number takes no memory."""
    tensor = constant_tensor(value)
    node = value.producer() if value is not None else None
    if tensor is not None or node is None or value is None:
        return tensor
    source = node.inputs[0] if node.inputs else None
    if node.op_type == "Identity" or (node.op_type == "Cast" and source is not None and source.dtype == value.dtype):
        return stored_tensor(source)
    if node.op_type == "ConstantOfShape" and (shape := stored_tensor(source)) is not None:
        attribute = node.attributes.get("value")
        element = attribute.as_tensor() if attribute is not None else ir.Tensor(np.zeros(1, np.float32))
        return ir.Tensor(np.broadcast_to(element.numpy().reshape(()), shape.numpy().tolist()), dtype=element.dtype)
    return None


def constant_ints(value: ir.Value | None) -> tuple[int, ...] | None:
    """Return the integers of a small constant, such as axes or a shape, or of a Concat of such."""
    producer = value.producer() if value is not None else None
    if producer is not None and producer.op_type == "Concat":
        parts = [item for value in producer.inputs if (item := constant_ints(value)) is not None]
        return tuple(chain.from_iterable(parts)) if len(parts) == len(producer.inputs) else None
    tensor = constant_tensor(value)
    if tensor is None or tensor.size > 64 or not tensor.dtype.is_integer():
        return None
    return tuple(int(n) for n in tensor.numpy().reshape(-1))
