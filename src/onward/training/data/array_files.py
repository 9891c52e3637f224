"""Files of arrays: `.npy`, a column; `.npz`, a zip file of columns; `.safetensors`. Nothing is ever unpickled."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from onward.errors import DataError, Error
from onward.model.storage.containers import BAD_ZIP, members_of, npy_header, safetensors_header, stored_range
from onward.training.data.dataset import Columns
from onward.training.data.files import DataFile, FileRows, rows_of

_PICKLED = "save arrays of numbers: files with pickled objects can run code when loaded, so they are not"
_LONGEST_HEADER = 1 << 20
_MOST_TURNED = 64 << 20  # bytes of an array in Fortran order that is turned in memory
_AT_ONCE = 1 << 20


def open_npy(path: Path, name: str | None = None) -> Columns:
    """An array as a column, which is called like the file unless it has a `name`."""
    return Columns({name or path.stem: _array(DataFile.open(path), 0, str(path))}, path.name)


def open_npz(path: Path, only: str | None = None) -> Columns:
    """All arrays of a file as columns, or only one."""
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
        hint = "it was not written or copied to its end, or is something else; write it again"
        raise DataError(f"{path} is not a whole .npz file: {error}", hint=hint) from None
    return Columns(arrays, path.name)


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: DataFile) -> FileRows | np.ndarray:
    origin = f"{file.origin}, array `{info.filename.removesuffix('.npy')}`"
    if info.compress_type == zipfile.ZIP_STORED:  # its bytes are in the file as they are
        start, room = stored_range(archive, info)
        return _array(file, start, origin, room)

    def unpack(target: IO[bytes]) -> None:
        """All that the header promises, and no more: a small file can unpack to a very large one."""
        with archive.open(info) as packed:
            start = packed.read(_LONGEST_HEADER)
            stored = npy_header(start)
            target.write(start)
            left = stored.offset + stored.size - len(start)
            while left > 0 and (part := packed.read(min(left, _AT_ONCE))):
                target.write(part)
                left -= len(part)

    return _array(DataFile.temporary(unpack, origin), 0, origin)


def _array(file: DataFile, offset: int, origin: str, room: int | None = None) -> FileRows | np.ndarray:
    """The array in .npy format that begins at `offset`, and takes so much `room` at most."""
    try:
        stored = npy_header(file.read(offset, _LONGEST_HEADER))
    except ValueError as error:
        raise DataError(f"{origin} is not a .npy file: {error}") from None
    if stored.dtype.hasobject:
        raise DataError(f"{origin} holds Python objects, not numbers", hint=_PICKLED)
    if room is not None and stored.offset + stored.size > room:
        raise DataError(f"{origin} is cut off: it has {room:,} bytes of {stored.offset + stored.size:,}")
    stored = stored._replace(offset=offset + stored.offset)
    if not stored.is_fortran or len(stored.shape) < 2:
        return rows_of(file, stored)
    if stored.size > _MOST_TURNED:
        hint = "save it with np.ascontiguousarray(...)"
        raise DataError(f"{origin} is stored column by column (Fortran order), so rows cannot be read", hint=hint)
    flipped = rows_of(file, stored._replace(shape=stored.shape[::-1]))
    return np.ascontiguousarray((flipped if isinstance(flipped, np.ndarray) else flipped.all()).T)


# ---- .safetensors: a length, a header in JSON, and the bytes ---------------------------------------------------------


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
