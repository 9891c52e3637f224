"""`.safetensors` as data: each tensor is a column. The format is a length, a header in JSON, and the bytes."""

from __future__ import annotations

from pathlib import Path

from onward.errors import DataError
from onward.model.storage.headers import safetensors_header
from onward.training.data.dataset import Columns
from onward.training.data.files import DataFile, rows_of


def open_safetensors(path: Path, only: str | None = None) -> Columns:
    """All tensors of a file as columns, or only one."""
    file = DataFile.open(path)
    try:
        tensors = safetensors_header(file.read, file.size)
    except ValueError as error:
        raise DataError(f"{path} is not a whole .safetensors file: {error}") from None
    if only in tensors:
        tensors = {only: tensors[only]}
    return Columns({name: rows_of(file, stored) for name, stored in tensors.items()}, path.name)
