"""Ports of a graph: their type and shape."""

from __future__ import annotations

import onnx_ir as ir

from onward.inspect.summary import Port, Shape

_TYPE_NAMES = {"FLOAT": "float32", "DOUBLE": "float64"}


def port(value: ir.Value) -> Port:
    return Port(value.name or "", type_name(value.type), shape_of(value))


def type_name(kind: ir.TypeProtocol | None) -> str:
    """`float32`, `sequence(int64)`, or `?`."""
    if kind is None:
        return "?"
    if isinstance(kind, ir.TensorType):
        return dtype_name(kind.dtype)
    inner = getattr(kind, "elem_type", None)
    words = {ir.SequenceType: "sequence", ir.OptionalType: "optional", ir.SparseTensorType: "sparse"}
    word = next((word for cls, word in words.items() if isinstance(kind, cls)), type(kind).__name__)
    return f"{word}({dtype_name(inner) if isinstance(inner, ir.DataType) else type_name(inner)})"


def dtype_name(dtype: ir.DataType | None) -> str:
    if dtype is None or dtype == ir.DataType.UNDEFINED:
        return "?"
    return _TYPE_NAMES.get(dtype.name, dtype.name.lower())


def shape_of(value: ir.Value) -> Shape | None:
    if value.shape is None:
        return None
    return tuple(axis if isinstance(axis, int) else axis.value for axis in value.shape)
