"""Arrays of numpy: `.npy`, a column, and `.npz`, a zip file of columns. Nothing is ever unpickled."""

from __future__ import annotations

import shutil
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np

from onward.errors import DataError
from onward.train.data.dataset import HELD, Columns
from onward.train.data.files import FileRows, open_binary, rows_of

_PICKLED = "save arrays of numbers: files with pickled objects can run code when loaded, so they are not"


def open_npy(path: Path) -> Columns:
    file = open_binary(path)
    return Columns({path.stem: _array(file, 0, str(path))}, path.name)


def open_npz(path: Path) -> Columns:
    file = open_binary(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
            arrays = {info.filename.removesuffix(".npy"): _member(archive, info, file, path) for info in members}
    except (zipfile.BadZipFile, EOFError, OSError, struct.error) as error:
        if isinstance(error, DataError):
            raise
        hint = "it was not written or copied to its end, or is something else; write it again"
        raise DataError(f"{path} is not a whole .npz file: {error}", hint=hint) from None
    return Columns(arrays, path.name)


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: BinaryIO, path: Path) -> FileRows | np.ndarray:
    origin = f"{path}, array `{info.filename.removesuffix('.npy')}`"
    if info.compress_type == zipfile.ZIP_STORED:  # its bytes are in the file as they are
        file.seek(info.header_offset + 26)  # the directory may give other lengths than the header before the bytes
        name_length, extra_length = struct.unpack("<HH", file.read(4))
        return _array(file, info.header_offset + 30 + name_length + extra_length, origin)
    unpacked = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 # vanishes when closed, or when the process ends
    with archive.open(info) as packed:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    return _array(unpacked, 0, origin)


def _array(file: BinaryIO, offset: int, origin: str) -> FileRows | np.ndarray:
    """The array in .npy format that begins at `offset`."""
    file.seek(offset)
    try:
        shape, fortran, dtype = _header(file)
    except (ValueError, EOFError) as error:
        raise DataError(f"{origin} is not a .npy file: {error}") from None
    if dtype.hasobject:
        raise DataError(f"{origin} holds Python objects, not numbers", hint=_PICKLED)
    start = file.tell()
    if not fortran or len(shape) < 2:
        return rows_of(file, start, dtype, shape, origin)
    if dtype.itemsize * int(np.prod(shape, dtype=np.int64)) > HELD:
        hint = "save it with np.ascontiguousarray(...)"
        raise DataError(f"{origin} is stored column by column (Fortran order), so rows cannot be read", hint=hint)
    flipped = rows_of(file, start, dtype, shape[::-1], origin)
    return np.ascontiguousarray(np.asarray(flipped).T)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call, unused-ignore]
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)  # type: ignore[no-untyped-call, unused-ignore]
