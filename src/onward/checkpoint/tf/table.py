"""Tables of keys and values as LevelDB has them in a file, which is what the index of a TensorFlow checkpoint is."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from onward.model.storage.wire import crc32c, mask, read_varint, varint

_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
_TRAILER = struct.Struct("<BI")
"""After each block: whether it is compressed, and its checksum."""
_NUMBER = struct.Struct("<I")
_BLOCK = 1 << 18
"""Bytes after which a block is ended."""
_MOST_SHARED = 100
"""How many times as long as a block its keys may be. A short block can make keys without end of what they share."""


def read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values in their order. A ValueError says what is wrong."""
    if len(data) < _FOOTER or int.from_bytes(data[-8:], "little") != _MAGIC:
        raise ValueError("it does not end as a table does")
    footer = data[-_FOOTER:]
    _, _, at = _handle(footer, 0)
    start, size, _ = _handle(footer, at)
    last = None
    for _, where in _entries(_block(data, start, size)):
        start, size, _ = _handle(where, 0)
        for key, value in _entries(_block(data, start, size)):
            if last is not None and key <= last:
                raise ValueError("its keys are not in their order")
            last = key
            yield key, value


def _handle(data: bytes, at: int) -> tuple[int, int, int]:
    start, at = read_varint(data, at)
    size, at = read_varint(data, at)
    return start, size, at


def _block(data: bytes, start: int, size: int) -> bytes:
    end = start + size
    if end + _TRAILER.size > len(data) - _FOOTER:
        raise ValueError("a block of it lies outside of the file")
    kind, checksum = _TRAILER.unpack_from(data, end)
    if mask(crc32c(data[start : end + 1])) != checksum:
        raise ValueError("a checksum does not fit: it is damaged")
    if kind:
        raise ValueError("it is compressed")
    return data[start:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(block) < 4:
        raise ValueError("a block of it is cut off")
    end = len(block) - 4 - 4 * _NUMBER.unpack_from(block, len(block) - 4)[0]
    at, key, unpacked = 0, b"", 0
    while at < end:
        shared, at = read_varint(block, at)
        own, at = read_varint(block, at)
        length, at = read_varint(block, at)
        if shared > len(key) or at + own + length > end:
            raise ValueError("an entry of it lies outside of its block")
        key = key[:shared] + block[at : at + own]
        at += own + length
        unpacked += len(key)
        if unpacked > _MOST_SHARED * len(block):
            raise ValueError("its keys are longer than those of any table")
        yield key, block[at - length : at]


# ---- writing ---------------------------------------------------------------------------------------------------------


def make_table(entries: Mapping[bytes, bytes]) -> bytes:
    """A table with these entries."""
    file, index, block, key = bytearray(), bytearray(), bytearray(), b""
    for key in sorted(entries):
        block += _entry(key, entries[key])
        if len(block) >= _BLOCK:
            index += _entry(key, _append(file, block))
            block = bytearray()
    if block:
        index += _entry(key, _append(file, block))
    handles = _append(file, bytearray()) + _append(file, index)
    return bytes(file + handles.ljust(_FOOTER - 8, b"\0") + _MAGIC.to_bytes(8, "little"))


def _entry(key: bytes, value: bytes) -> bytes:
    """An entry that shares nothing with the one before."""
    return varint(0) + varint(len(key)) + varint(len(value)) + key + value


def _append(file: bytearray, block: bytearray) -> bytes:
    """Add a block with one place to start from, its beginning; the handle to find it."""
    whole = bytes(block) + _NUMBER.pack(0) + _NUMBER.pack(1)
    start = len(file)
    file += whole + _TRAILER.pack(0, mask(crc32c(whole + b"\0")))
    return varint(start) + varint(len(whole))
