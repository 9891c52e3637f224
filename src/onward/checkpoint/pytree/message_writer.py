"""Trees as msgpack, in the bytes that Flax writes."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, cast

import numpy as np

from onward.checkpoint.pytree.messages import ARRAY, COMPLEX, PIECES, SCALAR
from onward.errors import UnsupportedError
from onward.run_state.tensors import Tensor

LARGEST_PIECE = 2**30
"""Bytes. Flax cuts larger arrays into pieces."""


def write_messages(tree: Any, file: BinaryIO) -> None:
    """Write a tree, an array at a time, in the bytes that Flax would write."""
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
    """A single value."""
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
    raise UnsupportedError(f"files of Flax have no place for {value!r}", hint="leave it out of the tree")


def _integer(value: int) -> bytes:
    if -32 <= value < 128:
        return struct.pack(">B", value & 0xFF)
    kinds = enumerate("BHIQ", 0xCC) if value > 0 else enumerate("bhiq", 0xD0)
    for tag, kind in kinds:
        bits = 8 * struct.calcsize(kind) - (value < 0)
        if -(1 << bits) <= value < 1 << bits:
            return struct.pack(f">B{kind}", tag, value)
    raise UnsupportedError(f"msgpack has no whole numbers as large as {value}")


def _head(size: int, *forms: tuple[int, str | int]) -> bytes:
    """What stands before so many bytes or values: the first form that can hold the size."""
    for tag, kind in forms:
        if isinstance(kind, int) and size < kind:
            return struct.pack(">B", tag | size)
        if isinstance(kind, str) and size < 1 << 8 * struct.calcsize(kind):
            return struct.pack(f">B{kind}", tag, size)
    raise UnsupportedError("a part of the tree is larger than msgpack can say")


def _extension_head(kind: int, size: int) -> bytes:
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}
    begin = struct.pack(">B", fixed[size]) if size in fixed else _head(size, (0xC7, "B"), (0xC8, "H"), (0xC9, "I"))
    return begin + struct.pack(">b", kind)


def _array_head(kind: int, dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    size = dtype.itemsize * math.prod(shape)
    sizes = _head(len(shape), (0x90, 16), (0xDC, "H")) + b"".join(map(_integer, shape))
    inside = b"\x93" + sizes + _pack(dtype.name) + _head(size, (0xC4, "B"), (0xC5, "H"), (0xC6, "I"))
    return _extension_head(kind, len(inside) + size) + inside


def _write_pieces(tensor: Tensor, file: BinaryIO) -> None:
    """As Flax writes what is too large for one piece: elements in their order, cut without regard to axes."""
    most, count = max(1, LARGEST_PIECE // tensor.dtype.itemsize), math.prod(tensor.shape)
    sizes = [min(most, count - begin) for begin in range(0, count, most)]
    file.write(b"\x83" + _pack(PIECES) + b"\xc3" + _pack("shape"))
    write_messages({str(axis): size for axis, size in enumerate(tensor.shape)}, file)
    file.write(_pack("chunks") + _head(len(sizes), (0x80, 16), (0xDE, "H"), (0xDF, "I")))
    heads = [_pack(str(i)) + _array_head(ARRAY, tensor.dtype, (size,)) for i, size in enumerate(sizes)]
    parts = ((head, size * tensor.dtype.itemsize) for head, size in zip(heads, sizes, strict=True))
    tensor.write_to(cast(BinaryIO, _Interspersed(file, parts)))


class _Interspersed:
    """A file in which heads stand between the bytes that are written to it."""

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
