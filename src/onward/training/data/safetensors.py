"""`.safetensors` as data: each tensor is a column. The format is a length, a header in JSON, and the bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from onward.errors import DataError
from onward.training.data.dataset import Columns
from onward.training.data.files import DataFile, FileRows, rows_of

_DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64,
    "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip


def open_safetensors(path: Path, only: str | None = None) -> Columns:
    """All tensors of a file as columns, or only one."""
    file = DataFile.open(path)
    length = int.from_bytes(file.read(0, 8), "little")
    if length > file.size - 8:
        raise DataError(f"{path} is not a whole .safetensors file: its header would end beyond the file")
    try:
        tensors = json.loads(file.read(8, length))
        tensors.pop("__metadata__", None)
        if only in tensors:
            tensors = {only: tensors[only]}
        arrays = {name: _rows(file, 8 + length, entry) for name, entry in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the header of {path} is not that of a .safetensors file: {error!r}") from None
    return Columns(arrays, path.name)


def _rows(file: DataFile, start: int, entry: dict[str, Any]) -> FileRows | np.ndarray:
    dtype = np.dtype(_DTYPES[entry["dtype"]])
    return rows_of(file, start + int(entry["data_offsets"][0]), dtype, tuple(entry["shape"]))
