"""`.npz`, a zip file of arrays: read without numpy's own reader, which trusts what files say."""

from __future__ import annotations

import zipfile
from typing import Literal

import numpy as np

from onward.model.storage.files import PathLike, regular
from onward.model.storage.headers import npy_header
from onward.model.storage.zip_members import BAD_ZIP, members_of

_LONGEST_HEADER = 1 << 20
_LARGEST = 1 << 30
"""Bytes of an array. A packed file of 1 MB can hold one of 1 GB, and these are read into memory."""


def read_npz(path: PathLike) -> dict[str, np.ndarray]:
    """All arrays of a file, which is small. What is wrong with it is said by a ValueError or an OSError."""
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
            data = start + packed.read(max(end - len(start), 0))  # and no more, which may be very much
        if end > len(data):
            raise ValueError("it is cut off")
    except ValueError as error:
        raise ValueError(f"array `{name}`: {error}") from None
    flat = np.frombuffer(data, stored.dtype, stored.size // stored.dtype.itemsize, stored.offset)
    order: Literal["F", "C"] = "F" if stored.is_fortran else "C"
    return flat.reshape(stored.shape, order=order).astype(stored.dtype.newbyteorder("="), order="C")
