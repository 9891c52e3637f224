"""Tensor bundles of TensorFlow, without TensorFlow: an index, and data of tensors in one or several
files.

The index is a table of LevelDB.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from onward.errors import InvalidModelError, UnsupportedError
from onward.model.storage.files import blame_file, regular
from onward.model.storage.wire import (
    Summed,
    as_signed,
    crc32c,
    field,
    fixed_field,
    mask,
    numbers,
    read_varint,
    texts,
    varint,
)
from onward.run_state.tensors import ScatteredTensor, StoredTensor, Tensor, contiguous_strides

INDEX = ".index"
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_LARGEST_INDEX = 1 << 30
_HEADER = field(1, 1) + field(3, field(1, 1))
"""One data file, little endian, version 1."""
_STRING = 7
_TYPES: dict[int, Any] = {
    1: np.float32, 2: np.float64, 3: np.int32, 4: np.uint8, 5: np.int16, 6: np.int8, 8: np.complex64, 9: np.int64,
    10: np.bool_, 14: ml_dtypes.bfloat16, 17: np.uint16, 18: np.complex128, 19: np.float16, 22: np.uint32,
    23: np.uint64, 24: ml_dtypes.float8_e5m2, 25: ml_dtypes.float8_e4m3fn,
}  # fmt: skip
_NUMBERS = {np.dtype(dtype): number for number, dtype in _TYPES.items()}

Tree = Mapping[str, Any]
"""Key -> tensor, or a mapping with kind, shape, checksum and data for strings and variants."""


class _Entry(NamedTuple):
    data_type: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    slices: tuple[tuple[tuple[int, int], ...], ...]
    """Start and length of each piece along each axis; a length of -1 is the whole axis."""


def read_bundle(prefix: Path) -> dict[str, Any]:
    """Return the content of a checkpoint by key. `prefix` is its path without an ending."""
    path = prefix.with_name(prefix.name + INDEX)
    with blame_file(f"`{path}` is not the index of a whole checkpoint"):
        if regular(path).st_size > _LARGEST_INDEX:
            raise ValueError("it is too large")
        entries = dict(read_table(path.read_bytes()))
        shards = _shards(entries.pop(b"", b""))
        return _Files(prefix, shards, {key: _entry(value) for key, value in entries.items()}).tree()


def _shards(header: bytes) -> int:
    fields = numbers(header)
    if not 0 < fields.get(1, 0) < 100_000:
        raise ValueError("it has no valid number of files")
    if fields.get(2, 0):
        raise UnsupportedError(
            "the checkpoint was written by a machine with another byte order",
            hint="save it on a machine with the byte order of this one",
        )
    return fields[1]


def _entry(data: bytes) -> _Entry:
    fields = numbers(data)
    shape = tuple(_size(dimension) for sizes in texts(data, 2) for dimension in texts(sizes, 2))
    slices = tuple(tuple(map(_extent, texts(piece, 1))) for piece in texts(data, 7))
    data_type, shard, offset, size, checksum = (fields.get(number, 0) for number in (1, 3, 4, 5, 6))
    return _Entry(data_type, shape, shard, offset, size, checksum, slices)


def _size(dimension: bytes) -> int:
    size = as_signed(numbers(dimension).get(1, 0))
    if not 0 <= size < 2**48:
        raise ValueError("a tensor has an invalid shape")
    return size


def _extent(extent: bytes) -> tuple[int, int]:
    fields = numbers(extent)
    return as_signed(fields.get(1, 0)), as_signed(fields[2]) if 2 in fields else -1


class _Files:
    def __init__(self, prefix: Path, shards: int, entries: Mapping[bytes, _Entry]):
        self._entries = entries
        self._paths = [prefix.with_name(f"{prefix.name}.data-{at:05}-of-{shards:05}") for at in range(shards)]
        self._sizes: dict[int, int] = {}

    def tree(self) -> dict[str, Any]:
        entries = {key: entry for key, entry in self._entries.items() if not key.startswith(b"\0")}
        return {key.decode(): self._value(key, entry) for key, entry in entries.items()}

    def _value(self, key: bytes, entry: _Entry) -> Any:
        if entry.slices:
            return self._scattered_tensor(key, entry)
        if entry.data_type not in _TYPES:
            data = self._stored_tensor(entry, np.dtype(np.uint8), (entry.size,))
            return {"kind": entry.data_type, "shape": list(entry.shape), "checksum": entry.checksum, "data": data}
        return self._stored_tensor(entry, np.dtype(_TYPES[entry.data_type]), entry.shape)

    def _stored_tensor(self, entry: _Entry, dtype: np.dtype, shape: tuple[int, ...]) -> StoredTensor:
        if entry.shard >= len(self._paths):
            raise ValueError(f"it has {len(self._paths)} data files, and a tensor is in another")
        if entry.size != math.prod(shape) * dtype.itemsize:
            raise ValueError("a tensor has another size than its shape")
        if entry.shard not in self._sizes:
            self._sizes[entry.shard] = regular(self._paths[entry.shard]).st_size
        if entry.offset + entry.size > self._sizes[entry.shard]:
            raise ValueError(f"a tensor lies outside of `{self._paths[entry.shard].name}`")
        return StoredTensor(self._paths[entry.shard], entry.offset, dtype, shape, contiguous_strides(shape))

    def _scattered_tensor(self, key: bytes, entry: _Entry) -> ScatteredTensor:
        """Return a variable in pieces, which have keys with their extents."""
        if entry.data_type not in _TYPES:
            raise ValueError("a tensor in pieces is not numeric")
        pieces = []
        for extents in entry.slices:
            stored = self._entries.get(_slice_key(key, extents))
            if stored is None or len(extents) != len(entry.shape) or stored.data_type != entry.data_type:
                raise ValueError(f"a piece of `{key.decode()}` is missing")
            axes = [(*extent, whole) for extent, whole in zip(extents, entry.shape, strict=True)]
            sizes = tuple(whole if length < 0 else length for _, length, whole in axes)
            begin = tuple(start for start, _ in extents)
            if any(not 0 <= at <= whole - size for (at, _, whole), size in zip(axes, sizes, strict=True)):
                raise ValueError(f"a piece of `{key.decode()}` lies outside of it")
            piece = self._stored_tensor(stored, np.dtype(_TYPES[stored.data_type]), sizes)
            pieces.append((begin, partial(lambda tensor: tensor, piece)))
        if sum(math.prod(find().shape) for _, find in pieces) != math.prod(entry.shape):
            raise ValueError(f"the pieces of `{key.decode()}` do not have its size")
        return ScatteredTensor(np.dtype(_TYPES[entry.data_type]), entry.shape, tuple(pieces))


def _slice_key(name: bytes, extents: tuple[tuple[int, int], ...]) -> bytes:
    """Return the key of a piece: numbers and strings in an encoding that keeps their order."""
    escaped = name.replace(b"\xff", b"\xff\x00").replace(b"\x00", b"\x00\xff")
    rank = len(extents).to_bytes(1, "big")
    places = b"".join(map(_ordered_code, itertools.chain.from_iterable(extents)))
    return b"\x00" + escaped + b"\x00\x01" + (b"\x01" + rank if extents else b"\x00") + places


def _ordered_code(number: int) -> bytes:
    length = (~number if number < 0 else number).bit_length() // 7 + 1
    header = ((1 << length) - 1) << (8 * length - length)
    return (number & (1 << 8 * length) - 1 ^ header).to_bytes(length, "big")


def text_of(value: Any) -> bytes | None:
    """Return the string of an entry; None for other entries."""
    if not isinstance(value, Mapping) or value.get("kind") != _STRING or value.get("shape"):
        return None
    data = value["data"].array().tobytes()
    with blame_file("a string of the checkpoint is damaged"):
        length, at = read_varint(data, 0)
    if at + 4 + length != len(data):
        raise InvalidModelError("a string of the checkpoint is cut off")
    text = data[at + 4 :]
    if (data[at : at + 4], value["checksum"]) != _text_checksums(text):
        raise InvalidModelError("a string of the checkpoint has a wrong checksum")
    return text


def _text_checksums(text: bytes) -> tuple[bytes, int]:
    """Return the checksum of the length, which precedes a string, and that of both."""
    length = crc32c(len(text).to_bytes(8 if len(text) >> 32 else 4, "little"))
    between = mask(length).to_bytes(4, "little")
    return between, mask(crc32c(between + text, length))


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_bundle(prefix: Path, tree: Tree) -> None:
    """Write a checkpoint, one tensor at a time, into one data file and an index."""
    entries = {b"": _HEADER}
    with open(prefix.with_name(f"{prefix.name}.data-00000-of-00001"), "wb") as file:
        summed = Summed(file)
        for key in sorted(tree, key=str.encode):
            value, start = tree[key], file.tell()
            tensor = value if isinstance(value, Tensor) else value["data"]
            tensor.write_to(summed)  # type: ignore[arg-type]
            checksum, size = summed.take(), file.tell() - start
            if not isinstance(value, Tensor):  # the checksum of a string is not that of its bytes
                entry = _encode_entry(int(value["kind"]), value["shape"], start, size, value["checksum"])
            elif value.dtype in _NUMBERS:
                entry = _encode_entry(_NUMBERS[value.dtype], value.shape, start, size, checksum)
            else:
                raise UnsupportedError(f"`{key}` is of {value.dtype}, which TensorFlow does not have")
            entries[key.encode()] = entry
    prefix.with_name(prefix.name + INDEX).write_bytes(make_table(entries))


def _encode_entry(data_type: int, shape: Iterable[int], offset: int, size: int, checksum: int) -> bytes:
    dimensions = b"".join(field(2, field(1, length)) for length in shape)
    position = field(4, offset) + field(5, size) + fixed_field(6, "<I", checksum)
    return field(1, data_type) + field(2, dimensions) + position


def names_in(folder: Path) -> Iterator[str]:
    """Return the checkpoints in a folder, by their names without an ending."""
    return (path.name.removesuffix(INDEX) for path in sorted(folder.glob(f"*{INDEX}")) if path.is_file())


# ---- tables of LevelDB -----------------------------------------------------------------------------------------------


_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
_TRAILER = struct.Struct("<BI")
"""Compression and checksum after each block."""
_NUMBER = struct.Struct("<I")
_BLOCK = 1 << 18
"""Size in bytes after which a block ends."""
_MOST_SHARED = 100
"""Largest size of keys as a multiple of their block: shared prefixes can make endless keys."""


def read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Return keys and values in order; raise a ValueError for a damaged table."""
    if len(data) < _FOOTER or int.from_bytes(data[-8:], "little") != _MAGIC:
        raise ValueError("it has no footer of a table")
    footer = data[-_FOOTER:]
    _, _, at = _handle(footer, 0)
    start, size, _ = _handle(footer, at)
    last = None
    for _, handle in _entries(_block(data, start, size)):
        start, size, _ = _handle(handle, 0)
        for key, value in _entries(_block(data, start, size)):
            if last is not None and key <= last:
                raise ValueError("its keys are not sorted")
            last = key
            yield key, value


def _handle(data: bytes, at: int) -> tuple[int, int, int]:
    start, at = read_varint(data, at)
    size, at = read_varint(data, at)
    return start, size, at


def _block(data: bytes, start: int, size: int) -> bytes:
    end = start + size
    if end + _TRAILER.size > len(data) - _FOOTER:
        raise ValueError("a block lies outside of the file")
    compression, checksum = _TRAILER.unpack_from(data, end)
    if mask(crc32c(data[start : end + 1])) != checksum:
        raise ValueError("a checksum is wrong: it is damaged")
    if compression:
        raise ValueError("it is compressed")
    return data[start:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(block) < 4:
        raise ValueError("a block is cut off")
    end = len(block) - 4 - 4 * _NUMBER.unpack_from(block, len(block) - 4)[0]
    at, key, unpacked = 0, b"", 0
    while at < end:
        shared, at = read_varint(block, at)
        own, at = read_varint(block, at)
        length, at = read_varint(block, at)
        if shared > len(key) or at + own + length > end:
            raise ValueError("an entry lies outside of its block")
        key = key[:shared] + block[at : at + own]
        at += own + length
        unpacked += len(key)
        if unpacked > _MOST_SHARED * len(block):
            raise ValueError("its keys are too long")
        yield key, block[at - length : at]


# ---- writing ---------------------------------------------------------------------------------------------------------


def make_table(entries: Mapping[bytes, bytes]) -> bytes:
    """Return a table with these entries."""
    file, index, block, key = bytearray(), bytearray(), bytearray(), b""
    for key in sorted(entries):
        block += _table_entry(key, entries[key])
        if len(block) >= _BLOCK:
            index += _table_entry(key, _append(file, block))
            block = bytearray()
    if block:
        index += _table_entry(key, _append(file, block))
    handles = _append(file, bytearray()) + _append(file, index)
    return bytes(file + handles.ljust(_FOOTER - 8, b"\0") + _MAGIC.to_bytes(8, "little"))


def _table_entry(key: bytes, value: bytes) -> bytes:
    """Return an entry that shares no prefix with the one before."""
    return varint(0) + varint(len(key)) + varint(len(value)) + key + value


def _append(file: bytearray, block: bytearray) -> bytes:
    """Append a block with one restart point; return its handle."""
    content = bytes(block) + _NUMBER.pack(0) + _NUMBER.pack(1)
    start = len(file)
    file += content + _TRAILER.pack(0, mask(crc32c(content + b"\0")))
    return varint(start) + varint(len(content))
