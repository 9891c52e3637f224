"""msgpack, as Flax writes trees in it: a reader that leaves arrays where they lie."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from onward.checkpoint.pytorch.archive import TYPES as OF_PYTORCH
from onward.errors import InvalidModelError
from onward.model.storage.files import blame_file, regular
from onward.run_state.tensors import JoinedTensor, StoredTensor, Tensor, contiguous_strides

ARRAY, COMPLEX, SCALAR = 1, 2, 3
"""What Flax adds to msgpack."""
PIECES = "__msgpack_chunked_array__"
_DEEPEST, _MOST_VALUES = 200, 5_000_000

_KINDS = (*OF_PYTORCH.values(), ml_dtypes.int4, ml_dtypes.uint4)
_TYPES = {np.dtype(kind).name: np.dtype(kind) for kind in _KINDS}


def begins_a_tree(path: Path) -> bool:
    """Whether a file begins as a map with names does."""
    with open(path, "rb") as file:
        begin = file.read(512)
    sizes = {0xDE: 3, 0xDF: 5}
    if not begin or not (0x80 < begin[0] < 0x90 or begin[0] in sizes):
        return False
    reader = _Reader(begin, path, sizes.get(begin[0], 1))
    try:
        key = reader.value()
    except InvalidModelError:
        return False
    return isinstance(key, str) and bool(key) and key.isprintable()


def read_messages(path: Path) -> Any:
    """The tree of a file, in which arrays are places."""
    with blame_file(f"cannot read `{path}`"):
        regular(path)
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with data:
        reader = _Reader(data, path)
        tree = reader.value()
        if reader.at != len(data):
            raise reader.problem("more follows after the tree")
        return tree


class _Reader:
    """Where one is in the bytes of a file."""

    def __init__(self, data: bytes | mmap.mmap, path: Path, at: int = 0):
        self._data, self._path, self.at = data, path, at
        self._end, self._depth, self._values = len(data), 0, 0

    def problem(self, what: str) -> InvalidModelError:
        return InvalidModelError(f"`{self._path}` is not a whole file of msgpack: {what} (byte {self.at})")

    def value(self) -> Any:
        self._values += 1
        if self._values > _MOST_VALUES:
            raise self.problem("it holds more values than any does")
        tag = self.take(1)[0]
        if tag < 0x80 or tag >= 0xE0:
            return tag if tag < 0x80 else tag - 256
        if tag < 0xC0:
            return self.map(tag & 15) if tag < 0x90 else self.list(tag & 15) if tag < 0xA0 else self.text(tag & 31)
        if tag not in _READERS:
            raise self.problem("there is no such type")
        return _READERS[tag](self)

    def take(self, size: int) -> bytes:
        if size > self._end - self.at:
            raise self.problem("it is cut off")
        self.at += size
        return self._data[self.at - size : self.at]

    def number(self, kind: str) -> Any:
        return struct.unpack(f">{kind}", self.take(struct.calcsize(kind)))[0]

    def text(self, size: int) -> str:
        try:
            return self.take(size).decode()
        except UnicodeDecodeError as error:
            raise self.problem("a text is none") from error

    def list(self, size: int) -> list[Any]:
        return list(self._inside(size))

    def map(self, size: int) -> Any:
        found: dict[Any, Any] = {}
        values = self._inside(2 * size)
        for key in values:
            if not isinstance(key, str | int) or key in found:
                raise self.problem("a key is no name, or there twice")
            found[key] = next(values)
        return self._join(found) if found.get(PIECES) is True else found

    def _inside(self, size: int) -> Iterator[Any]:
        if size > self._end - self.at:
            raise self.problem("it is cut off")
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self.problem("it is nested too deeply")
        for _ in range(size):
            yield self.value()
        self._depth -= 1

    def extension(self, size: int) -> Any:
        kind, end = self.number("b"), self.at + size
        if end > self._end:
            raise self.problem("it is cut off")
        if kind == COMPLEX:
            parts = self.value()
            made: Any = complex(*parts) if _are(parts, float) and len(parts) == 2 else None
        elif kind in (ARRAY, SCALAR):
            made = self._array()
            made = made.array()[()] if kind == SCALAR and not made.shape else made
        else:
            raise self.problem(f"the extension {kind} is not Flax's")
        if made is None or self.at != end:
            raise self.problem("an array or number is not as long as it should be")
        return made

    def _array(self) -> StoredTensor:
        """A shape, a type and the place of elements."""
        if self.take(1) != b"\x93":
            raise self.problem("an array has no shape and type")
        shape, name = self.value(), self.value()
        size = self.number(_BINARY[tag]) if (tag := self.take(1)[0]) in _BINARY else -1
        if not (_are(shape, int) and all(0 <= n < 2**62 for n in shape) and isinstance(name, str) and name in _TYPES):
            raise self.problem("an array has no shape or type that there could be")
        dtype, sizes = _TYPES[name], tuple(shape)
        if size != dtype.itemsize * math.prod(sizes) or size > self._end - self.at:
            raise self.problem("an array has more or fewer elements than its shape")
        self.at += size
        return StoredTensor(self._path, self.at - size, dtype, sizes, contiguous_strides(sizes))

    def _join(self, parts: Mapping[Any, Any]) -> JoinedTensor:
        shape, pieces = (_in_order(parts.get(key)) for key in ("shape", "chunks"))
        if shape is None or not (
            _are(shape, int) and pieces and _are(pieces, Tensor) and len({piece.dtype for piece in pieces}) == 1
        ):
            raise self.problem("pieces of an array make none")
        if min(shape, default=0) < 0 or sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
            raise self.problem("pieces of an array do not have its size")
        return JoinedTensor(pieces[0].dtype, tuple(shape), tuple(pieces))


def _are(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _in_order(parts: Any) -> list[Any] | None:
    """What Flax makes a dict with the keys 0, 1, 2 ... of."""
    if not isinstance(parts, dict) or [*parts] != [str(i) for i in range(len(parts))]:
        return None
    return [*parts.values()]


def _sized_reader(read: Callable[[_Reader, int], Any], kind: str) -> Callable[[_Reader], Any]:
    return lambda reader: read(reader, reader.number(kind))


def _number(kind: str) -> Callable[[_Reader], Any]:
    return lambda reader: reader.number(kind)


def _fixed_reader(size: int) -> Callable[[_Reader], Any]:
    return lambda reader: reader.extension(size)


_BINARY = {0xC4: "B", 0xC5: "H", 0xC6: "I"}
_READERS: dict[int, Callable[[_Reader], Any]] = {
    0xC0: lambda reader: None,
    0xC2: lambda reader: False,
    0xC3: lambda reader: True,
    **{tag: _sized_reader(_Reader.take, kind) for tag, kind in _BINARY.items()},
    **{tag: _sized_reader(_Reader.extension, kind) for tag, kind in enumerate("BHI", 0xC7)},
    **{tag: _number(kind) for tag, kind in enumerate("fdBHIQbhiq", 0xCA)},
    **{tag: _fixed_reader(size) for tag, size in enumerate((1, 2, 4, 8, 16), 0xD4)},
    **{tag: _sized_reader(_Reader.text, kind) for tag, kind in enumerate("BHI", 0xD9)},
    **{tag: _sized_reader(_Reader.list, kind) for tag, kind in enumerate("HI", 0xDC)},
    **{tag: _sized_reader(_Reader.map, kind) for tag, kind in enumerate("HI", 0xDE)},
}
"""By the first byte of a value."""
