"""Checksums of a model file and of the data files that were saved with it.

They are the last metadata entry of the file, so that one rename commits them with the model. The
entry lists ranges of data files, and ends with the CRC-32 of every byte before it, as text.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from onnx import ModelProto, StringStringEntryProto

from onward.errors import InvalidModelError
from onward.model.storage.files import BLOCK, is_plain_name, mentions, reason, regular

Range = tuple[int, int, int]
"""Offset and length in a data file, and the CRC-32 of these bytes."""
Ranges = Mapping[str, Sequence[Range]]
"""By the name of the data file, which is in the folder of the model file."""

CHECKSUMS = "onward.checksums"
_TAIL = re.compile(rb" ([0-9a-f]{8}) crc32:([0-9a-f]{8})")  # the length of the list before it, and the checksum
_TAIL_BYTES = len(" 00000000 crc32:00000000")
_DIGITS = 8


def checksum_entry(payload: bytes, ranges: Ranges) -> bytes:
    """Return the metadata entry with the checksums, to append to a serialized model."""
    listed = json.dumps(ranges, separators=(",", ":"))
    text = f"{listed} {len(listed):0{_DIGITS}x} crc32:{0:0{_DIGITS}x}"
    entry = ModelProto(metadata_props=[StringStringEntryProto(key=CHECKSUMS, value=text)]).SerializeToString()
    entry = entry[:-_DIGITS]
    return entry + f"{zlib.crc32(entry, zlib.crc32(payload)):0{_DIGITS}x}".encode()


def stored_ranges(path: Path) -> Ranges | None:
    """Return the checksums that a model file lists for data files; None if missing or damaged."""
    try:
        with path.open("rb") as file:
            return _read_ranges(file, regular(path).st_size)[0]
    except (OSError, ValueError):
        return None


def verify_checksums(path: Path) -> bool:
    """Compare a model file and its data with their checksums. Return False if there are none.

    Raises:
        InvalidModelError: if a byte has changed since they were saved.
    """
    try:
        size = regular(path).st_size
        with path.open("rb") as file:
            try:
                ranges, checksum = _read_ranges(file, size)
            except ValueError:
                if not mentions(path, CHECKSUMS):
                    return False
                raise _damage(path, "its checksum is unreadable") from None
            if _checksum(file, 0, size - _DIGITS) != checksum:
                raise _damage(path, "its checksum differs")
        for name, listed in ranges.items():
            _verify_data(path.with_name(name), listed)
    except OSError as error:
        raise InvalidModelError(f"could not read `{error.filename or path}`: {reason(error)}") from error
    return True


def _verify_data(path: Path, ranges: Sequence[Range]) -> None:
    regular(path)
    with path.open("rb") as file:
        for start, length, checksum in ranges:
            if _checksum(file, start, length) != checksum:
                raise _damage(path, f"the checksum of bytes {start:,} to {start + length:,} differs")


def _read_ranges(file: BinaryIO, size: int) -> tuple[dict[str, list[Range]], int]:
    file.seek(max(size - _TAIL_BYTES, 0))
    tail = _TAIL.fullmatch(file.read(_TAIL_BYTES))
    if tail is None:
        raise ValueError("no checksum")
    length = int(tail[1], 16)
    file.seek(max(size - _TAIL_BYTES - length, 0))
    ranges = json.loads(file.read(length))
    if not isinstance(ranges, dict) or not all(map(is_plain_name, ranges)) or not all(map(_is_ranges, ranges.values())):
        raise ValueError("no list of checksums")
    return ranges, int(tail[2], 16)


def _is_ranges(ranges: Any) -> bool:
    return isinstance(ranges, list) and all(
        isinstance(entry, list) and len(entry) == 3 and all(type(n) is int and n >= 0 for n in entry)
        for entry in ranges
    )


def _checksum(file: BinaryIO, start: int, length: int) -> int:
    file.seek(start)
    checksum = 0
    while length > 0 and (block := file.read(min(length, BLOCK))):
        checksum = zlib.crc32(block, checksum)
        length -= len(block)
    return checksum if length <= 0 else -1  # the file is too short


def _damage(path: Path, what: str) -> InvalidModelError:
    hint = "restore it from a copy"
    if path.suffix == ".onnx":
        hint += f'; if you changed it on purpose: `onward.load("{path}").save("{path}")`'
    return InvalidModelError(f"`{path}` has changed since it was saved: {what}", hint=hint)
