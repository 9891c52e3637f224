"""Tensors in a file: what cannot be read is refused before anything relies on it."""

from __future__ import annotations

import math

import onnx
from onnx import ModelProto

from onward.errors import InvalidModelError
from onward.model import storage

_MAX_RANK = 256
_FIELDS: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float_data",
    onnx.TensorProto.COMPLEX64: "float_data",
    onnx.TensorProto.DOUBLE: "double_data",
    onnx.TensorProto.COMPLEX128: "double_data",
    onnx.TensorProto.INT64: "int64_data",
    onnx.TensorProto.UINT32: "uint64_data",
    onnx.TensorProto.UINT64: "uint64_data",
    onnx.TensorProto.STRING: "string_data",
}
DATA_FIELDS = (*dict.fromkeys(_FIELDS.values()), "int32_data")


def field_of(data_type: int) -> str:
    """Where a tensor of a type has its numbers, if they are not in the form of bytes."""
    return _FIELDS.get(data_type, "int32_data")


def check_tensors(proto: ModelProto) -> None:
    """Refuse tensors of absurd rank, whose size alone would keep us busy, and data that are not what they should be."""
    for tensor in storage.walk_tensors(proto):
        if len(tensor.dims) > _MAX_RANK:
            raise InvalidModelError(f"tensor `{tensor.name}` has {len(tensor.dims)} dimensions")
        if tensor.HasField("raw_data") and (problem := _misfit(tensor)):
            raise InvalidModelError(f"tensor `{tensor.name}` {problem}", hint="the file is damaged, or wrongly written")
        for field in DATA_FIELDS[:-1]:
            if len(getattr(tensor, field)) and field_of(tensor.data_type) != field:
                kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
                raise InvalidModelError(f"tensor `{tensor.name}` of type {kind} has its data in `{field}`")


def _misfit(tensor: onnx.TensorProto) -> str | None:
    """What is wrong with data in the form of bytes."""
    if tensor.data_type == onnx.TensorProto.UNDEFINED:
        return "has data, but no type"
    if (width := storage.bits_of(tensor)) is None:
        return None
    bits, there = width * math.prod(tensor.dims), len(tensor.raw_data)
    return None if there * 8 - 8 < bits <= there * 8 else f"has {there} bytes, and needs {-(-bits // 8)}"
