"""Tensors in a file: what cannot be read is refused before anything relies on it."""

from __future__ import annotations

import math

import onnx
import onnx_ir as ir
from onnx import ModelProto

from onward.errors import InvalidModelError
from onward.model import storage

_MAX_RANK = 256
_KNOWN_TYPES = {kind.value for kind in ir.DataType}
_DATA_FIELDS = {
    "float_data": (onnx.TensorProto.FLOAT, onnx.TensorProto.COMPLEX64),
    "double_data": (onnx.TensorProto.DOUBLE, onnx.TensorProto.COMPLEX128),
    "int64_data": (onnx.TensorProto.INT64,),
    "uint64_data": (onnx.TensorProto.UINT32, onnx.TensorProto.UINT64),
    "string_data": (onnx.TensorProto.STRING,),
}


def check_tensors(proto: ModelProto) -> None:
    """Refuse tensors of absurd rank, whose size alone would keep us busy, and data that are not what they should be."""
    for tensor in storage.walk_tensors(proto):
        if len(tensor.dims) > _MAX_RANK:
            raise InvalidModelError(f"tensor `{tensor.name}` has {len(tensor.dims)} dimensions")
        if tensor.HasField("raw_data") and (problem := _misfit(tensor)):
            raise InvalidModelError(f"tensor `{tensor.name}` {problem}", hint="the file is damaged, or wrongly written")
        for field, types in _DATA_FIELDS.items():
            if len(getattr(tensor, field)) and tensor.data_type not in types:
                kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
                raise InvalidModelError(f"tensor `{tensor.name}` of type {kind} has its data in `{field}`")


def _misfit(tensor: onnx.TensorProto) -> str | None:
    """What is wrong with data in the form of bytes."""
    if tensor.data_type == onnx.TensorProto.UNDEFINED:
        return "has data, but no type"
    if tensor.data_type == onnx.TensorProto.STRING or tensor.data_type not in _KNOWN_TYPES:
        return None
    bits = ir.DataType(tensor.data_type).bitwidth * math.prod(tensor.dims)
    there = len(tensor.raw_data)
    return None if there * 8 - 8 < bits <= there * 8 else f"has {there} bytes, and needs {-(-bits // 8)}"
