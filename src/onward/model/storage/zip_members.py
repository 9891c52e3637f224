"""The files in a zip file, and where they lie in it."""

from __future__ import annotations

import lzma
import os
import struct
import zipfile
import zlib

LOCAL_HEADER = struct.Struct("<4s22xHH")
"""What stands before a member, but for its name and what else is said there: a mark, and how long these are."""
ZIPPED = b"PK\x03\x04"
BAD_ZIP = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, ValueError, OverflowError,
    NotImplementedError, RuntimeError,
)  # fmt: skip
"""What is raised for zip files that are damaged, or of a kind that is not read."""


def members_of(archive: zipfile.ZipFile, ending: str = "") -> dict[str, zipfile.ZipInfo]:
    """The files of an archive, by their names without an ending."""
    found: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if not info.filename:
            raise ValueError("a file in it has no name")
        name = info.filename.removesuffix(ending)
        if name in found:  # readers differ in which one they take
            raise ValueError(f"`{name}` is in it twice")
        found[name] = info
    return found


def stored_range(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[int, int]:
    """Where the bytes of a member begin in the file, and how many they are: they lie there as they are."""
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
    """Return the bytes of a member that is not compressed, and of at most so many bytes."""
    _, size = stored_range(archive, info)
    if size > most:
        raise ValueError(f"`{info.filename}` is larger than any of a checkpoint")
    return archive.read(info)  # which verifies the checksum
