"""Conversion of a model to another floating-point type: tensors, casts, nested graphs, functions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx import defs

from onward.constants import constant_tensor
from onward.errors import UnsupportedError
from onward.model import Model
from onward.model.core import values
from onward.model.walk import attributes, graphs_in, graphs_of
from onward.standard import is_standard

FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_NUMBERS_OF_FLOATS = tuple(dtype.value for dtype in FLOATS)

_TYPE_ATTRIBUTES = ("to", "dtype", "stash_type", "output_dtype", "output_datatype", "softmax_precision")
"""Attributes with the number of a type."""


def convert_floats(model: Model, dtype: ir.DataType, *, settings: bool = False) -> Model:
    """Return a copy with all floats as `dtype`, and all tensors in memory; raise if an operator forbids it.

    With `settings`, do not raise: for an engine that takes the type in all operators.
    """
    model = model.copy()
    for graph in [inner for outer in graphs_of(model) for inner in graphs_in(outer)]:
        for value in values(graph):
            if value.dtype in FLOATS:
                value.type = ir.TensorType(dtype)
        for value in graph.initializers.values():
            if value.const_value is not None:
                value.const_value = _tensor(value.const_value, dtype)
        for node in list(graph):
            _convert_attributes(node, model.opset, dtype)
            if not settings:
                _cast_settings_back(node, model.opset, dtype)
    return model


def _tensor(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.TensorProtocol:
    if tensor.dtype not in FLOATS:
        return ir.Tensor(tensor.numpy(), dtype=tensor.dtype) if isinstance(tensor, ir.ExternalTensor) else tensor
    return ir.Tensor(tensor.numpy().astype(dtype.numpy()), dtype=dtype)


def _convert_attributes(node: ir.Node, opset: int, dtype: ir.DataType) -> None:
    for attribute in list(node.attributes.values()):
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.TENSOR:
            node.attributes.add(ir.AttrTensor(attribute.name, _tensor(attribute.as_tensor(), dtype)))
        elif attribute.name in ("value_float", "value_floats"):  # these are always float32
            del node.attributes[attribute.name]
            node.attributes.add(ir.AttrTensor("value", ir.Tensor(np.asarray(attribute.value, dtype.numpy()))))
    for name, value in attributes(node, opset).items():
        if name in _TYPE_ATTRIBUTES and value in _NUMBERS_OF_FLOATS:
            node.attributes.add(ir.AttrInt64(name, dtype.value))
    if node.op_type == "ConstantOfShape" and "value" not in node.attributes:
        node.attributes.add(ir.AttrTensor("value", ir.Tensor(np.zeros(1, dtype.numpy()))))


def _cast_settings_back(node: ir.Node, opset: int, dtype: ir.DataType) -> None:
    """Cast constants back to float32 where an operator requires it, such as the scales of Resize.

    A computed value cannot be cast: rounding would hide the differences.
    """
    for i, value in enumerate(node.inputs):
        if value is None or value.dtype != dtype or _takes(node, i, opset, dtype):
            continue
        if constant_tensor(value) is None:
            raise UnsupportedError(f"`{node.op_type}` does not take {dtype.name.lower()}")
        cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", ir.DataType.FLOAT.value)])
        cast.outputs[0].name = f"{node.outputs[0].name}/{value.name}/float"
        cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), value.shape
        node.prepend(cast)
        node.replace_input_with(i, cast.outputs[0])


def _takes(node: ir.Node, index: int, opset: int, dtype: ir.DataType) -> bool:
    """True if an operator takes this type as an input, or nothing is known."""
    if not is_standard(node) or not defs.has(node.op_type):
        return True
    schema = defs.get_schema(node.op_type, opset)
    formal = schema.inputs[min(index, len(schema.inputs) - 1)]
    return f"tensor({dtype.name.lower()})" in formal.types
