"""Arrays of numpy: `.npy`, a column, and `.npz`, a zip file of columns. Nothing is ever unpickled."""

from __future__ import annotations

import io
import shutil
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from onward.errors import DataError
from onward.training.data.dataset import Columns
from onward.training.data.files import DataFile, FileRows, rows_of

_PICKLED = "save arrays of numbers: files with pickled objects can run code when loaded, so they are not"
_LONGEST_HEADER = 1 << 20
_MOST_TURNED = 64 << 20  # bytes of an array in Fortran order that is turned in memory


def open_npy(path: Path) -> Columns:
    return Columns({path.stem: _array(DataFile.open(path), 0, str(path))}, path.name)


def open_npz(path: Path, only: str | None = None) -> Columns:
    """All arrays of a file as columns, or only one."""
    file = DataFile.open(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if only in members:
                members = {only: members[only]}
            arrays = {name: _member(archive, info, file) for name, info in members.items()}
    except (zipfile.BadZipFile, zlib.error, EOFError, struct.error, NotImplementedError, RuntimeError) as error:
        hint = "it was not written or copied to its end, or is something else; write it again"
        raise DataError(f"{path} is not a whole .npz file: {error}", hint=hint) from None
    return Columns(arrays, path.name)


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: DataFile) -> FileRows | np.ndarray:
    origin = f"{file.origin}, array `{info.filename.removesuffix('.npy')}`"
    if info.compress_type == zipfile.ZIP_STORED:  # its bytes are in the file as they are
        lengths = file.read(info.header_offset + 26, 4)  # of what is before them; the directory may have others
        return _array(file, info.header_offset + 30 + sum(struct.unpack("<HH", lengths)), origin)
    with archive.open(info) as packed:
        unpacked = DataFile.temporary(lambda file: shutil.copyfileobj(packed, file, 1 << 20), origin)
    return _array(unpacked, 0, origin)


def _array(file: DataFile, offset: int, origin: str) -> FileRows | np.ndarray:
    """The array in .npy format that begins at `offset`."""
    start = io.BytesIO(file.read(offset, _LONGEST_HEADER))
    try:
        shape, is_fortran, dtype = _header(start)
    except (ValueError, EOFError) as error:
        raise DataError(f"{origin} is not a .npy file: {error}") from None
    if dtype.hasobject:
        raise DataError(f"{origin} holds Python objects, not numbers", hint=_PICKLED)
    offset += start.tell()
    if not is_fortran or len(shape) < 2:
        return rows_of(file, offset, dtype, shape)
    if dtype.itemsize * int(np.prod(shape, dtype=np.int64)) > _MOST_TURNED:
        hint = "save it with np.ascontiguousarray(...)"
        raise DataError(f"{origin} is stored column by column (Fortran order), so rows cannot be read", hint=hint)
    flipped = rows_of(file, offset, dtype, shape[::-1])
    return np.ascontiguousarray((flipped if isinstance(flipped, np.ndarray) else flipped.all()).T)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)
