"""Tensors of a checkpoint as tensors of an ONNX model, which read them where they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onward.model.storage.open_files import HeldTensor, hold_open
from onward.run_state.tensors import ArrayTensor, ModelTensor, StoredTensor, Tensor


def as_initializer(tensor: Tensor, name: str, tags: Mapping[str, str] | None = None) -> ir.TensorProtocol:
    """A tensor for a model, with a name and tags there."""
    described: dict[str, Any] = {
        "dtype": ir.DataType.from_numpy(tensor.dtype),
        "shape": ir.Shape(tensor.shape),
        "name": name,
        "metadata_props": dict(tags or {}),
    }
    if isinstance(tensor, StoredTensor) and tensor.is_contiguous and tensor.nbytes:
        path = Path(os.path.realpath(tensor.path))
        source = hold_open(path)
        if source is not None:
            where = (source, path.name, tensor.offset, tensor.nbytes)
            return HeldTensor(*where, base_dir=str(path.parent), **described)
    if isinstance(tensor, ModelTensor | ArrayTensor):
        return ir.Tensor(tensor.array(), **described)
    return ir.LazyTensor(lambda: ir.Tensor(tensor.array(), dtype=described["dtype"]), **described)
