"""Array files: `.npy` (one column), `.npz` and `.safetensors`. Nothing is unpickled."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from onward.errors import DataError, Error
from onward.model.storage.containers import BAD_ZIP, members_of, npy_header, safetensors_header, stored_range
from onward.training.data.dataset import Columns
from onward.training.data.files import DataFile, FileRows, rows_of

_PICKLED = "save arrays of numbers: pickled objects are not loaded, since they can run code"
_LONGEST_HEADER = 1 << 20
_MOST_TRANSPOSED = 64 << 20  # bytes of an array in Fortran order that is transposed in memory
_AT_ONCE = 1 << 20


def open_npy(path: Path, name: str | None = None) -> Columns:
    """Open an array as a column, named `name` or like the file."""
    return Columns({name or path.stem: _array(DataFile.open(path), 0, str(path))}, path.name)


def open_npz(path: Path, only: str | None = None) -> Columns:
    """Open all arrays of a file as columns, or `only` one."""
    file = DataFile.open(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = members_of(archive, ".npy")
            if only in members:
                members = {only: members[only]}
            arrays = {name: _member(archive, info, file) for name, info in members.items()}
    except Error:
        raise
    except BAD_ZIP as error:
        hint = "the file is truncated, damaged or of another format; write it again"
        raise DataError(f"{path} is not a complete .npz file: {error}", hint=hint) from None
    return Columns(arrays, path.name)


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: DataFile) -> FileRows | np.ndarray:
    origin = f"{file.origin}, array `{info.filename.removesuffix('.npy')}`"
    if info.compress_type == zipfile.ZIP_STORED:  # uncompressed: read in place
        start, room = stored_range(archive, info)
        return _array(file, start, origin, room)

    def unpack(target: IO[bytes]) -> None:
        """Unpack the size in the header and no more: a small file can unpack to a very large one."""
        with archive.open(info) as packed:
            start = packed.read(_LONGEST_HEADER)
            stored = npy_header(start)
            target.write(start)
            left = stored.offset + stored.size - len(start)
            while left > 0 and (chunk := packed.read(min(left, _AT_ONCE))):
                target.write(chunk)
                left -= len(chunk)

    return _array(DataFile.temporary(unpack, origin), 0, origin)


def _array(file: DataFile, offset: int, origin: str, room: int | None = None) -> FileRows | np.ndarray:
    """Return the array in .npy format at `offset`, of at most `room` bytes."""
    try:
        stored = npy_header(file.read(offset, _LONGEST_HEADER))
    except ValueError as error:
        raise DataError(f"{origin} is not a .npy file: {error}") from None
    if stored.dtype.hasobject:
        raise DataError(f"{origin} holds Python objects, not numbers", hint=_PICKLED)
    if room is not None and stored.offset + stored.size > room:
        raise DataError(f"{origin} is truncated: it has {room:,} of {stored.offset + stored.size:,} bytes")
    stored = stored._replace(offset=offset + stored.offset)
    if not stored.is_fortran or len(stored.shape) < 2:
        return rows_of(file, stored)
    if stored.size > _MOST_TRANSPOSED:
        hint = "save it with np.ascontiguousarray(...)"
        raise DataError(f"cannot read rows of {origin}: it is stored in Fortran order", hint=hint)
    transposed = rows_of(file, stored._replace(shape=stored.shape[::-1]))
    return np.ascontiguousarray((transposed if isinstance(transposed, np.ndarray) else transposed.all()).T)


# ---- .safetensors: a length, a header in JSON, and the bytes ---------------------------------------------------------


def open_safetensors(path: Path, only: str | None = None) -> Columns:
    """Open all tensors of a file as columns, or `only` one."""
    file = DataFile.open(path)
    try:
        tensors = safetensors_header(file.read, file.size)
    except ValueError as error:
        raise DataError(f"{path} is not a complete .safetensors file: {error}") from None
    if only in tensors:
        tensors = {only: tensors[only]}
    return Columns({name: rows_of(file, stored) for name, stored in tensors.items()}, path.name)
