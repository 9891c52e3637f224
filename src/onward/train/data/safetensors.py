"""`.safetensors` as data: each tensor is a column. The format is a length, a header in JSON, and the bytes."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from onward.errors import DataError
from onward.train.data.dataset import Columns
from onward.train.data.files import open_binary, rows_of

_DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64,
    "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip


def open_safetensors(path: Path) -> Columns:
    file = open_binary(path)
    size = file.seek(0, 2)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise DataError(f"{path} is not a whole .safetensors file: its header would end beyond the file")
    try:
        header = json.loads(file.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        arrays = {
            name: rows_of(
                file,
                8 + length + int(entry["data_offsets"][0]),
                np.dtype(_DTYPES[entry["dtype"]]),
                tuple(entry["shape"]),
                f"{path}, tensor `{name}`",
            )
            for name, entry in tensors.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the header of {path} is not that of a .safetensors file: {error!r}") from None
    return Columns(arrays, path.name)
