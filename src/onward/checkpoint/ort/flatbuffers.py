"""Flatbuffers, both ways, as far as checkpoints need them: tables of numbers, strings, vectors and
bytes.

The reader checks each offset against the file. All that it reads may not exceed the size of the
file, so that a table with a thousand references is not read a thousand times. The writer goes
forward: first all tables, then the data of tensors.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from onward.errors import UnsupportedError
from onward.run_state.tensors import Tensor


class Buffer:
    """Bytes of a file, with a limit on how many are read. Errors are a ValueError."""

    def __init__(self, data: Any):
        self._data = data
        self.size = len(data)
        self._left = self.size

    def root(self) -> FlatTable:
        return FlatTable(self, self.follow(0))

    def number(self, format: str, at: int) -> Any:
        self._reach(at, struct.calcsize(format))
        return struct.unpack_from(f"<{format}", self._data, at)[0]

    def follow(self, at: int) -> int:
        """Return the target of the offset that is stored at `at`."""
        return at + int(self.number("I", at))

    def vector(self, at: int, width: int) -> tuple[int, int]:
        """Return the start of the elements of a vector, and their number."""
        length = int(self.number("I", at))
        self._reach(at + 4, length * width)
        return at + 4, length

    def take(self, at: int, size: int) -> bytes:
        """Return bytes, which count against the limit."""
        self._left -= size
        if self._left < 0:
            raise ValueError("its parts are larger than the file")
        return bytes(self._data[at : at + size])

    def _reach(self, at: int, size: int) -> None:
        if not 0 <= at <= self.size - size:
            raise ValueError("an offset lies outside of the file")


@dataclasses.dataclass(frozen=True)
class FlatTable:
    """Table of a buffer. Fields are numbered; a missing one has its default."""

    buffer: Buffer
    at: int

    def number(self, field: int, format: str, default: Any) -> Any:
        at = self._position(field)
        return default if at is None else self.buffer.number(format, at)

    def text(self, field: int) -> str:
        at = self._position(field)
        if at is None:
            return ""
        return self.buffer.take(*self.buffer.vector(self.buffer.follow(at), 1)).decode("utf-8")

    def table(self, field: int) -> FlatTable | None:
        at = self._position(field)
        return None if at is None else FlatTable(self.buffer, self.buffer.follow(at))

    def tables(self, field: int) -> Iterator[FlatTable]:
        begin, length = self.vector(field, 4) or (0, 0)
        self.buffer.take(begin, 4 * length)
        for at in range(begin, begin + 4 * length, 4):
            yield FlatTable(self.buffer, self.buffer.follow(at))

    def numbers(self, field: int, format: str) -> tuple[Any, ...]:
        begin, length = self.vector(field, struct.calcsize(format)) or (0, 0)
        return struct.unpack(f"<{length}{format}", self.buffer.take(begin, length * struct.calcsize(format)))

    def vector(self, field: int, width: int) -> tuple[int, int] | None:
        """Return the start and the number of the elements of a vector; None if it is missing."""
        at = self._position(field)
        return None if at is None else self.buffer.vector(self.buffer.follow(at), width)

    def _position(self, field: int) -> int | None:
        layout = self.at - int(self.buffer.number("i", self.at))
        if 4 + 2 * field >= self.buffer.number("H", layout):
            return None
        offset = int(self.buffer.number("H", layout + 4 + 2 * field))
        return self.at + offset if offset else None


# ---- writing ---------------------------------------------------------------------------------------------------------

Fields = Mapping[int, Any]
"""Table to write: field -> `Number`, string, table, list of tables, `Numbers`, or a tensor."""

_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Number:
    format: str
    value: Any


@dataclasses.dataclass(frozen=True)
class Vector:
    format: str
    values: tuple[Any, ...]


def _pack(number: Number) -> bytes:
    try:
        return struct.pack(f"<{number.format}", number.value)
    except (struct.error, OverflowError):
        raise UnsupportedError(f"{number.value:.3g} is too large for the file format") from None


class Writer:
    """Writer of a file: tables are laid out at once, tensors when it is written."""

    def __init__(self, root: Fields, identifier: bytes):
        self._tables = bytearray(4) + identifier
        self._tensors: list[tuple[int, Tensor]] = []
        self._point(0, self._table(root))

    def write_to(self, file: BinaryIO) -> None:
        end, tensors = len(self._tables), []
        for field, tensor in self._tensors:
            begin = end + 4 + -(end + 4) % _ALIGNMENT
            tensors.append((begin, tensor))
            self._point(field, begin - 4)
            end = begin + tensor.nbytes
        file.write(self._tables)
        at = len(self._tables)
        for begin, tensor in tensors:
            file.write(bytes(begin - 4 - at) + struct.pack("<I", tensor.nbytes))
            tensor.write_to(file)
            at = begin + tensor.nbytes

    def _point(self, field: int, target: int) -> None:
        struct.pack_into("<I", self._tables, field, target - field)

    def _align(self, size: int, ahead: int = 0) -> None:
        """Pad so that the bytes after the next `ahead` begin at a multiple of `size`."""
        self._tables += bytes(-(len(self._tables) + ahead) % size)

    def _table(self, fields: Fields) -> int:
        """Write a table and its contents behind it."""
        present = {field: value for field, value in fields.items() if value is not None}
        formats = {field: value.format if isinstance(value, Number) else "I" for field, value in present.items()}
        offsets, size = {}, 4
        for field in sorted(present, key=lambda field: -struct.calcsize(formats[field])):
            offsets[field] = size
            size += struct.calcsize(formats[field])
        entries = [offsets.get(field, 0) for field in range(max(present, default=-1) + 1)]
        layout = struct.pack(f"<{2 + len(entries)}H", 4 + 2 * len(entries), size, *entries)
        self._align(8, ahead=len(layout) + 4)
        start = len(self._tables) + len(layout)
        self._tables += layout + struct.pack("<i", len(layout)) + bytes(size - 4)
        for field, value in present.items():
            at = start + offsets[field]
            if isinstance(value, Number):
                self._tables[at : at + struct.calcsize(value.format)] = _pack(value)
            elif isinstance(value, Tensor):
                self._tensors.append((at, value))
            else:
                self._point(at, self._behind(value))
        return start

    def _behind(self, value: Any) -> int:
        if isinstance(value, Mapping):
            return self._table(value)
        if isinstance(value, str):
            content = value.encode()
            return self._vector(len(content), 4, content + b"\x00")
        if isinstance(value, Vector):
            size, content = len(value.values), struct.pack(f"<{len(value.values)}{value.format}", *value.values)
            return self._vector(size, struct.calcsize(value.format), content)
        begin = self._vector(len(value), 4, bytes(4 * len(value)))
        for number, table in enumerate(value):
            self._point(begin + 4 + 4 * number, self._table(table))
        return begin

    def _vector(self, length: int, width: int, content: bytes) -> int:
        self._align(max(4, width), ahead=4)
        begin = len(self._tables)
        self._tables += struct.pack("<I", length) + content
        return begin
