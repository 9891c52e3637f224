"""Headers of array files, `.npy`, `.npz` and `.safetensors`, checked before use.

A header is untrusted text. Results have types of numpy, and shapes whose bytes exist. Faults are
ValueErrors, as the rest of a sentence about the file.
"""

from __future__ import annotations

import ast
import json
import lzma
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from onward.model.storage.files import PathLike, regular

LONGEST = 100 << 20
"""Maximum bytes of a header."""

_MAGIC = b"\x93NUMPY"
_TYPE = re.compile(r"[<>|=]?([biufcmMSUVO]\d{1,9}(\[\w{1,20}\])?|O|\?)")
_MOST_DIMS = 64
_OLD_LONG = re.compile(r"(?<=\d)L(?=[,)])")  # Python 2 wrote integers as 3L

SAFETENSORS_TYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64,
    "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip


class Stored(NamedTuple):
    """An array in a file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    is_fortran: bool = False

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


def npy_header(start: bytes) -> Stored:
    """Return the array behind the first bytes of a .npy file. `offset` is the start of its data."""
    if len(start) < 10 or start[:6] != _MAGIC:
        raise ValueError("it does not begin like one")
    if start[6] not in (1, 2, 3) or start[7]:
        raise ValueError(f"version {start[6]}.{start[7]} of the format is unknown")
    width = 2 if start[6] == 1 else 4
    offset = 8 + width + int.from_bytes(start[8 : 8 + width], "little")
    if offset > len(start):
        raise ValueError("its header is cut off")
    text = start[8 + width : offset].decode("utf-8" if start[6] == 3 else "latin-1")
    try:
        header = ast.literal_eval(_OLD_LONG.sub("", text).strip())
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        header = None
    if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("its header does not say type, order and shape")
    shape, is_fortran = header["shape"], header["fortran_order"]
    if not isinstance(shape, tuple) or not isinstance(is_fortran, bool):
        raise ValueError("its header does not say order and shape")
    return _check_shape(Stored(_npy_type(header["descr"]), shape, offset, is_fortran))


def _npy_type(text: Any) -> np.dtype:
    if isinstance(text, list):
        raise ValueError("it holds records of several fields; save each field as a separate array")
    try:
        dtype = np.dtype(text) if isinstance(text, str) and _TYPE.fullmatch(text) else None
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or not dtype.itemsize:
        raise ValueError(f"`{str(text)[:40]}` is not a type of numbers")
    return dtype


def safetensors_header(read: Callable[[int, int], bytes], size: int) -> dict[str, Stored]:
    """Return the tensors of a .safetensors file; `read` returns bytes from an offset."""
    length = int.from_bytes(read(0, 8), "little")
    if length > min(size - 8, LONGEST):
        raise ValueError("its header would end beyond the file")
    start = 8 + length
    try:
        header = json.loads(read(8, length), object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry, start, size) for name, entry in header.items()}
    _refuse_overlaps(tensors)
    return tensors


def safetensors_head(header: Mapping[str, Any], alignment: int = 64) -> bytes:
    """Return the header of a .safetensors file with its length."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def _without_doubles(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:  # readers differ in which one they take
            raise ValueError(f"its header has `{name[:40]}` twice")
        entries[name] = value
    return entries


def _tensor(name: str, entry: Any, start: int, end: int) -> Stored:
    what = f"`{name[:40]}` in its header"
    dtype = entry.get("dtype") if isinstance(entry, dict) else None
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_TYPES:
        raise ValueError(f"{what} has an unknown type")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or list(map(type, offsets)) != [int, int]:
        raise ValueError(f"{what} does not say its shape and offsets")
    stored = _check_shape(Stored(np.dtype(SAFETENSORS_TYPES[dtype]), tuple(shape), start + offsets[0]))
    if offsets[1] - offsets[0] != stored.size:
        raise ValueError(f"{what} has {offsets[1] - offsets[0]:,} bytes, and its type and shape need {stored.size:,}")
    if offsets[0] < 0 or start + offsets[1] > end:
        raise ValueError(f"{what} lies outside of the file, which is cut off")
    return stored


def _refuse_overlaps(tensors: dict[str, Stored]) -> None:
    end, before = 0, ""
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].offset):
        if stored.size and stored.offset < end:
            raise ValueError(f"`{before[:40]}` and `{name[:40]}` overlap")
        end, before = max(end, stored.offset + stored.size), name


def _check_shape(stored: Stored) -> Stored:
    dims = stored.shape
    if len(dims) > _MOST_DIMS or not all(type(dim) is int and 0 <= dim < 2**63 for dim in dims):
        raise ValueError(f"`{str(list(dims))[:40]}` is not a shape")
    if stored.dtype.itemsize * math.prod(dim for dim in dims if dim) >= 2**63:
        raise ValueError(f"its shape {list(dims)} is larger than any file")
    return stored


# ---- files in a zip file ---------------------------------------------------------------------------------------------


LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Local header of a zip member: a mark, and the lengths of the name and extra fields."""
ZIPPED = b"PK\x03\x04"
BAD_ZIP = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, ValueError, OverflowError,
    NotImplementedError, RuntimeError,
)  # fmt: skip
"""Exceptions for zip files that are damaged or unsupported."""


def members_of(archive: zipfile.ZipFile, ending: str = "") -> dict[str, zipfile.ZipInfo]:
    """Return the files of an archive by their names without the suffix."""
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if not info.filename:
            raise ValueError("a file in it has no name")
        name = info.filename.removesuffix(ending)
        if name in members:  # readers differ in which one they take
            raise ValueError(f"`{name}` is in it twice")
        members[name] = info
    return members


def stored_range(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[int, int]:
    """Return offset and size of an uncompressed member in its file."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise ValueError(f"`{info.filename}`, which unpacks to {info.file_size} bytes, is compressed or encrypted")
    file = archive.fp
    assert file is not None
    file.seek(info.header_offset)
    magic, name, extra = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
    if magic != ZIPPED:
        raise ValueError(f"`{info.filename}` is not where the zip file says")
    start = info.header_offset + LOCAL_HEADER.size + int(name) + int(extra)
    if start + info.file_size > file.seek(0, os.SEEK_END):
        raise ValueError(f"`{info.filename}` lies outside of the file")
    return start, info.file_size


def read_stored(archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> bytes:
    """Return the bytes of an uncompressed member up to a limit."""
    _, size = stored_range(archive, info)
    if size > most:
        raise ValueError(f"`{info.filename}` is larger than any of a checkpoint")
    return archive.read(info)  # which verifies the checksum


# ---- npz -------------------------------------------------------------------------------------------------------------


_LONGEST_HEADER = 1 << 20
_LARGEST = 1 << 30
"""Maximum bytes of an array in memory. A packed file of 1 MB can hold one of 1 GB."""


def read_npz(path: PathLike) -> dict[str, np.ndarray]:
    """Return all arrays of a small file; raise ValueError or OSError if it is damaged."""
    regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return {name: _array(name, archive, info) for name, info in members_of(archive, ".npy").items()}
    except (OSError, ValueError):
        raise
    except BAD_ZIP as error:
        raise ValueError(str(error) or "it is not whole") from error


def _array(name: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    try:
        with archive.open(info) as packed:
            start = packed.read(_LONGEST_HEADER)
            stored = npy_header(start)
            if stored.dtype.hasobject:
                raise ValueError("it holds Python objects, which are not loaded")
            if stored.size > _LARGEST:
                raise ValueError("it is larger than 1 GB")
            end = stored.offset + stored.size
            data = start + packed.read(max(end - len(start), 0))  # no more: a hostile file unpacks to any size
        if end > len(data):
            raise ValueError("it is cut off")
    except ValueError as error:
        raise ValueError(f"array `{name}`: {error}") from None
    flat = np.frombuffer(data, stored.dtype, stored.size // stored.dtype.itemsize, stored.offset)
    order: Literal["F", "C"] = "F" if stored.is_fortran else "C"
    return flat.reshape(stored.shape, order=order).astype(stored.dtype.newbyteorder("="), order="C")
