"""msgpack files of Flax. Arrays that are read stay in the file."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import ml_dtypes
import numpy as np

from onward.checkpoint.pytorch.archive import TYPES as OF_PYTORCH
from onward.errors import InvalidModelError, UnsupportedError
from onward.model.storage.files import blame_file, regular
from onward.run_state.tensors import JoinedTensor, StoredTensor, Tensor, contiguous_strides

ARRAY, COMPLEX, SCALAR = 1, 2, 3
"""Extension types of Flax."""
PIECES = "__msgpack_chunked_array__"
_DEEPEST, _MOST_VALUES = 200, 5_000_000

_DTYPES = (*OF_PYTORCH.values(), ml_dtypes.int4, ml_dtypes.uint4)
_TYPES = {np.dtype(dtype).name: np.dtype(dtype) for dtype in _DTYPES}


def begins_a_tree(path: Path) -> bool:
    """True for a file that begins as a map with names."""
    with open(path, "rb") as file:
        begin = file.read(512)
    sizes = {0xDE: 3, 0xDF: 5}
    if not begin or not (0x80 < begin[0] < 0x90 or begin[0] in sizes):
        return False
    try:
        key = _Reader(begin, path, sizes.get(begin[0], 1)).value()
    except InvalidModelError:
        return False
    return isinstance(key, str) and bool(key) and key.isprintable()


def read_messages(path: Path) -> Any:
    """Return the tree of a file, with arrays as locations."""
    with blame_file(f"cannot read `{path}`"):
        regular(path)
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with data:
        reader = _Reader(data, path)
        tree = reader.value()
        if reader.at != len(data):
            raise reader.problem("data follows after the tree")
        return tree


class _Reader:
    """Position in the bytes of a file, and the values from there."""

    def __init__(self, data: bytes | mmap.mmap, path: Path, at: int = 0):
        self._data, self._path, self.at = data, path, at
        self._end, self._depth, self._values = len(data), 0, 0

    def problem(self, reason: str) -> InvalidModelError:
        return InvalidModelError(f"`{self._path}` is not a whole file of msgpack: {reason} (byte {self.at})")

    def value(self) -> Any:
        self._values += 1
        if self._values > _MOST_VALUES:
            raise self.problem("it has too many values")
        tag = self.take(1)[0]
        if tag < 0x80 or tag >= 0xE0:
            return tag if tag < 0x80 else tag - 256
        if tag < 0xC0:
            return self.map(tag & 15) if tag < 0x90 else self.list(tag & 15) if tag < 0xA0 else self.text(tag & 31)
        if tag in _SIZED:
            read, code = _SIZED[tag]
            return read(self, self.number(code))
        if tag in _NUMBERS:
            return self.number(_NUMBERS[tag])
        if tag in _FIXED_EXTENSIONS:
            return self.extension(_FIXED_EXTENSIONS[tag])
        if tag not in _CONSTANTS:
            raise self.problem("it has an unknown type")
        return _CONSTANTS[tag]

    def take(self, size: int) -> bytes:
        if size > self._end - self.at:
            raise self.problem("it is cut off")
        self.at += size
        return self._data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f">{code}", self.take(struct.calcsize(code)))[0]

    def text(self, size: int) -> str:
        try:
            return self.take(size).decode()
        except UnicodeDecodeError as error:
            raise self.problem("a string is not UTF-8") from error

    def list(self, size: int) -> list[Any]:
        return list(self._inside(size))

    def map(self, size: int) -> Any:
        items: dict[Any, Any] = {}
        values = self._inside(2 * size)
        for key in values:
            if not isinstance(key, str | int) or key in items:
                raise self.problem("a key is not a name, or occurs twice")
            items[key] = next(values)
        return self._join(items) if items.get(PIECES) is True else items

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
        extension_type, end = self.number("b"), self.at + size
        if end > self._end:
            raise self.problem("it is cut off")
        if extension_type == COMPLEX:
            parts = self.value()
            value: Any = complex(*parts) if _are(parts, float) and len(parts) == 2 else None
        elif extension_type in (ARRAY, SCALAR):
            value = self._array()
            value = value.array()[()] if extension_type == SCALAR and not value.shape else value
        else:
            raise self.problem(f"the extension {extension_type} is not Flax's")
        if value is None or self.at != end:
            raise self.problem("an array or number is not as long as it should be")
        return value

    def _array(self) -> StoredTensor:
        """Read the shape, the dtype and the location of an array."""
        if self.take(1) != b"\x93":
            raise self.problem("an array has no shape and type")
        shape, name = self.value(), self.value()
        size = self.number(_BINARY[tag]) if (tag := self.take(1)[0]) in _BINARY else -1
        if not (_are(shape, int) and all(0 <= n < 2**62 for n in shape) and isinstance(name, str) and name in _TYPES):
            raise self.problem("an array has an invalid shape or type")
        dtype, sizes = _TYPES[name], tuple(shape)
        if size != dtype.itemsize * math.prod(sizes) or size > self._end - self.at:
            raise self.problem("an array has another size than its shape")
        self.at += size
        return StoredTensor(self._path, self.at - size, dtype, sizes, contiguous_strides(sizes))

    def _join(self, parts: Mapping[Any, Any]) -> JoinedTensor:
        shape, pieces = (_in_order(parts.get(key)) for key in ("shape", "chunks"))
        if shape is None or not (
            _are(shape, int) and pieces and _are(pieces, Tensor) and len({piece.dtype for piece in pieces}) == 1
        ):
            raise self.problem("pieces do not make an array")
        if min(shape, default=0) < 0 or sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
            raise self.problem("pieces of an array have another size")
        return JoinedTensor(pieces[0].dtype, tuple(shape), tuple(pieces))


def _are(values: Any, cls: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, cls) for value in values)


def _in_order(items: Any) -> list[Any] | None:
    """Return the values of a dict with the keys 0, 1, 2 ..., which Flax makes of a list."""
    if not isinstance(items, dict) or [*items] != [str(i) for i in range(len(items))]:
        return None
    return [*items.values()]


_BINARY = {0xC4: "B", 0xC5: "H", 0xC6: "I"}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = dict(enumerate("fdBHIQbhiq", 0xCA))
_FIXED_EXTENSIONS = dict(enumerate((1, 2, 4, 8, 16), 0xD4))
_SIZED: dict[int, tuple[Callable[[_Reader, int], Any], str]] = {
    tag: (read, code)
    for read, first, kinds in (
        (_Reader.take, 0xC4, "BHI"), (_Reader.extension, 0xC7, "BHI"), (_Reader.text, 0xD9, "BHI"),
        (_Reader.list, 0xDC, "HI"), (_Reader.map, 0xDE, "HI"),
    )
    for tag, code in enumerate(kinds, first)
}  # fmt: skip
"""First byte -> constant, type of a number, size of an extension, or reader and type of a size."""


# ---- writing ---------------------------------------------------------------------------------------------------------

LARGEST_PIECE = 2**30
"""Size in bytes from which on Flax cuts arrays into pieces."""


def write_messages(tree: Any, file: BinaryIO) -> None:
    """Write a tree in the same bytes as Flax, one array at a time."""
    if isinstance(tree, Mapping):
        file.write(_head(len(tree), (0x80, 16), (0xDE, "H"), (0xDF, "I")))
        for key, value in tree.items():
            write_messages(key, file)
            write_messages(value, file)
    elif isinstance(tree, list | tuple):
        file.write(_head(len(tree), (0x90, 16), (0xDC, "H"), (0xDD, "I")))
        for value in tree:
            write_messages(value, file)
    elif isinstance(tree, Tensor) and tree.nbytes > LARGEST_PIECE:
        _write_pieces(tree, file)
    elif isinstance(tree, Tensor):
        file.write(_array_head(ARRAY, tree.dtype, tree.shape))
        tree.write_to(file)
    else:
        file.write(_pack(tree))


def _pack(value: Any) -> bytes:
    """Return the bytes of a single value."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, np.generic):
        return _array_head(SCALAR, value.dtype, ()) + value.tobytes()
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return struct.pack(">Bd", 0xCB, value)
    if isinstance(value, complex):
        parts = struct.pack(">BBdBd", 0x92, 0xCB, value.real, 0xCB, value.imag)
        return _extension_head(COMPLEX, len(parts)) + parts
    if isinstance(value, bytes):
        return _head(len(value), (0xC4, "B"), (0xC5, "H"), (0xC6, "I")) + value
    if isinstance(value, str):
        text = value.encode()
        return _head(len(text), (0xA0, 32), (0xD9, "B"), (0xDA, "H"), (0xDB, "I")) + text
    raise UnsupportedError(f"files of Flax cannot hold {value!r}", hint="leave it out of the tree")


def _integer(value: int) -> bytes:
    if -32 <= value < 128:
        return struct.pack(">B", value & 0xFF)
    codes = enumerate("BHIQ", 0xCC) if value > 0 else enumerate("bhiq", 0xD0)
    for tag, code in codes:
        bits = 8 * struct.calcsize(code) - (value < 0)
        if -(1 << bits) <= value < 1 << bits:
            return struct.pack(f">B{code}", tag, value)
    raise UnsupportedError(f"{value} is too large an integer for msgpack")


def _head(size: int, *forms: tuple[int, str | int]) -> bytes:
    """Return the head of a value of some size, in the first form that can hold it."""
    for tag, limit in forms:
        if isinstance(limit, int) and size < limit:
            return struct.pack(">B", tag | size)
        if isinstance(limit, str) and size < 1 << 8 * struct.calcsize(limit):
            return struct.pack(f">B{limit}", tag, size)
    raise UnsupportedError("a part of the tree is too large for msgpack")


def _extension_head(extension_type: int, size: int) -> bytes:
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}
    begin = struct.pack(">B", fixed[size]) if size in fixed else _head(size, (0xC7, "B"), (0xC8, "H"), (0xC9, "I"))
    return begin + struct.pack(">b", extension_type)


def _array_head(extension_type: int, dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    size = dtype.itemsize * math.prod(shape)
    sizes = _head(len(shape), (0x90, 16), (0xDC, "H")) + b"".join(map(_integer, shape))
    inside = b"\x93" + sizes + _pack(dtype.name) + _head(size, (0xC4, "B"), (0xC5, "H"), (0xC6, "I"))
    return _extension_head(extension_type, len(inside) + size) + inside


def _write_pieces(tensor: Tensor, file: BinaryIO) -> None:
    """Write a large array as Flax does: elements in order, cut without regard to axes."""
    most, count = max(1, LARGEST_PIECE // tensor.dtype.itemsize), math.prod(tensor.shape)
    sizes = [min(most, count - begin) for begin in range(0, count, most)]
    file.write(b"\x83" + _pack(PIECES) + b"\xc3" + _pack("shape"))
    write_messages({str(axis): size for axis, size in enumerate(tensor.shape)}, file)
    file.write(_pack("chunks") + _head(len(sizes), (0x80, 16), (0xDE, "H"), (0xDF, "I")))
    heads = [_pack(str(i)) + _array_head(ARRAY, tensor.dtype, (size,)) for i, size in enumerate(sizes)]
    parts = ((head, size * tensor.dtype.itemsize) for head, size in zip(heads, sizes, strict=True))
    tensor.write_to(cast(BinaryIO, _Interspersed(file, parts)))


class _Interspersed:
    """File that inserts heads between the bytes that are written to it."""

    def __init__(self, file: BinaryIO, parts: Iterator[tuple[bytes, int]]):
        self._file, self._parts, self._left = file, parts, 0

    def write(self, block: Any) -> None:
        rest = memoryview(block)
        while rest:
            if not self._left:
                head, self._left = next(self._parts)
                self._file.write(head)
            self._file.write(rest[: self._left])
            done = min(self._left, len(rest))
            rest, self._left = rest[done:], self._left - done
