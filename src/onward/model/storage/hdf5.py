"""Reader of HDF5 as Keras writes it, without the HDF5 library.

Damaged files crash or hang that library, and HDF5 can refer to other files, in circles, and unpack
to any size. This reader supports only what h5py writes for Keras: groups with a symbol table,
contiguous arrays, text attributes. Every offset is checked, and none is visited twice.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from onward.model.storage.containers import Stored

HDF5 = b"\x89HDF\r\n\x1a\n"
"""First bytes of a file."""
_NOWHERE = (1 << 64) - 1
_MOST_PARTS, _DEEPEST = 20_000_000, 64
_OTHER_LAYOUT = "it has another layout than h5py gives to it: save it again with Keras"
_SPACE, _TYPE, _EXTERNAL, _LAYOUT, _ATTRIBUTE, _MORE, _SYMBOLS = 1, 3, 7, 8, 12, 16, 17
_NEWER = {2, 6, 18, 21}
"""Messages of newer layouts only: links, and attributes stored elsewhere."""
BFLOAT16 = {"dtype": "bfloat16"}
"""Attribute of Keras for arrays of a type that HDF5 lacks."""
DAMAGED = (OSError, ValueError, struct.error)
"""Exceptions for other or truncated files."""

Messages = list[tuple[int, bytes]]


def read_hdf5(data: mmap.mmap, start: int = 0, length: int | None = None) -> dict[str, dict[str, Any]]:
    """Return the groups of a file, or of the range from `start`, by path: attributes, arrays.

    Arrays are offsets in the file, or arrays if they are in a header or empty.
    """
    end = len(data) if length is None else start + length
    if end > len(data):
        raise ValueError("it lies outside of the file")
    return dict(_HDF5Reader(data, start, end).groups())


class _HDF5Reader:
    def __init__(self, data: mmap.mmap, start: int, end: int):
        self._data, self._start, self._end = data, start, end
        self._seen: set[int] = set()
        self._left = min(2 * (end - start), _MOST_PARTS)
        """Remaining reads: small hostile files can use the same bytes as many objects."""

    def _bytes(self, at: int, size: int) -> bytes:
        if at + size > self._end - self._start:
            raise ValueError("an object in it lies outside of the file")
        return self._data[self._start + at : self._start + at + size]

    def _numbers(self, form: str, at: int) -> tuple[Any, ...]:
        return struct.unpack(form, self._bytes(at, struct.calcsize(form)))

    def _visit(self, at: int) -> None:
        if at in self._seen:
            raise ValueError("it refers to one object twice, or in circles")
        self._seen.add(at)
        self._count()

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError("it claims more objects than fit into it")

    def groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        magic, version, offsets, lengths = self._numbers("<8sB4xBB", 0)
        if magic != HDF5:
            raise ValueError("it does not begin like one")
        if version > 1 or (offsets, lengths) != (8, 8):
            raise ValueError(_OTHER_LAYOUT)
        base, root = self._numbers("<Q32xQ", 24 if version == 0 else 28)[0], 24 + 4 * version + 32
        if base:
            raise ValueError("its base address is not its start")
        yield from self._group(self._numbers("<8xQ", root)[0], "", 0)

    def _group(self, at: int, path: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
        if depth > _DEEPEST:
            raise ValueError(f"its groups are nested more than {_DEEPEST} levels deep")
        messages = self._messages(at)
        tables = [struct.unpack("<QQ", data[:16]) for message_type, data in messages if message_type == _SYMBOLS]
        if len(tables) != 1:
            raise ValueError(f"`{path}` is not a group")
        arrays, inner = {}, []
        for name, member in self._members(*tables[0]):
            inside = self._messages(member, visit=False)
            if any(message_type == _SYMBOLS for message_type, _ in inside):
                inner.append((name, member))
            else:
                self._visit(member)
                arrays[name] = self._array(name, inside)
        yield path, {"attributes": self._attributes(messages), "arrays": arrays}
        for name, member in inner:
            yield from self._group(member, f"{path}/{name}".lstrip("/"), depth + 1)

    def _messages(self, at: int, visit: bool = True) -> Messages:
        """Return the messages in the header of an object, which may be in several blocks."""
        if visit:
            self._visit(at)
        version, count, size = self._numbers("<BxH4xI", at)
        if version != 1:
            raise ValueError(_OTHER_LAYOUT)
        pieces, messages = [(at + 16, size)], Messages()
        while pieces and len(messages) < count:
            offset, left = pieces.pop(0)
            while left >= 8 and len(messages) < count:
                message_type, length, flags = self._numbers("<HHB", offset)
                if (
                    length + 8 > left
                    or message_type in _NEWER
                    or (flags & 2 and message_type in (_SPACE, _TYPE, _LAYOUT))
                ):
                    raise ValueError("the header of an object in it is malformed")
                self._count()
                body = self._bytes(offset + 8, length)
                messages.append((message_type, body))
                if message_type == _MORE:
                    pieces.append(struct.unpack("<QQ", body[:16]))
                offset, left = offset + 8 + length, left - 8 - length
        return messages

    def _members(self, tree: int, heap: int) -> Iterator[tuple[str, int]]:
        """Yield names and offsets of a group's members: leaves of a tree."""
        magic, size, names = self._numbers("<4s4xQ8xQ", heap)
        if magic != b"HEAP":
            raise ValueError("the names of a group are missing")
        pending = [tree]
        while pending:
            at = pending.pop()
            self._visit(at)
            (magic,) = self._numbers("<4s", at)
            if magic == b"TREE":
                node_type, _, used = self._numbers("<BBH", at + 4)
                if node_type:
                    raise ValueError("the tree of a group is not one of members")
                children = struct.unpack(f"<{used * 2}Q", self._bytes(at + 24, used * 16))[1::2]
                pending.extend(reversed(children))
            elif magic == b"SNOD":
                for index in range(self._numbers("<H", at + 6)[0]):
                    name, member, cached = self._numbers("<QQI", at + 8 + 40 * index)
                    if cached == 2 or member == _NOWHERE or name >= size:
                        raise ValueError("it has a link to another place or file")
                    yield self._text(names + name, size - name), member
            else:
                raise ValueError("the members of a group are missing")

    def _text(self, at: int, most: int) -> str:
        return _until_zero(self._bytes(at, min(most, 4096, self._end - self._start - at)))

    # ---- arrays and attributes ---------------------------------------------------------------------------------------

    def _array(self, name: str, messages: Messages) -> Stored | np.ndarray:
        fields = dict(messages)
        if not fields.keys() >= {_SPACE, _TYPE, _LAYOUT} or _EXTERNAL in fields:
            raise ValueError(f"`{name}` is not an array, or its elements are in other files")
        shape = _shape(fields[_SPACE])
        named = self._attributes(messages).get("dtype")
        dtype = np.dtype(ml_dtypes.bfloat16) if named == BFLOAT16["dtype"] else _type(fields[_TYPE])
        if dtype.itemsize != struct.unpack_from("<I", fields[_TYPE], 4)[0]:
            raise ValueError(f"`{name}` has a type that Keras does not write")
        size = dtype.itemsize * int(np.prod(shape, dtype=object))
        version, layout_class = fields[_LAYOUT][:2]
        if version not in (3, 4) or layout_class > 1:
            raise ValueError(f"`{name}` is compressed or chunked: save it again with Keras")
        if layout_class == 0:
            (stored,) = struct.unpack_from("<H", fields[_LAYOUT], 2)
            if stored < size:
                raise ValueError(f"`{name}` is cut off")
            return np.frombuffer(fields[_LAYOUT][4 : 4 + size], dtype).reshape(shape)
        offset, stored = struct.unpack_from("<QQ", fields[_LAYOUT], 2)
        if not size:
            return np.zeros(shape, dtype)
        if stored < size or offset == _NOWHERE or offset + size > self._end - self._start:
            raise ValueError(f"`{name}` lies outside of the file")
        return Stored(dtype, shape, self._start + offset)

    def _attributes(self, messages: Messages) -> dict[str, Any]:
        """Return texts and lists of texts."""
        attributes: dict[str, Any] = {}
        for body in (body for message_type, body in messages if message_type == _ATTRIBUTE):
            version, named, typed, spaced = struct.unpack_from("<BxHHH", body)
            padded = 8 if version == 1 else 1
            at, parts = 9 if version == 3 else 8, []
            for size in (named, typed, spaced):
                parts.append(body[at : at + size])
                at += -(-size // padded) * padded
            name, text_type, space = parts
            type_class = text_type[0] & 15 if text_type else -1
            if type_class not in (3, 9):
                continue
            length = 16 if type_class == 9 else struct.unpack_from("<I", text_type, 4)[0]
            read = self._variable_text if type_class == 9 else _until_zero
            shape = _shape(space)
            ends = range(at + length, min(at + length * int(np.prod(shape, dtype=object)), len(body)) + 1, length or 1)
            texts = [read(body[end - length : end]) for end in ends]
            attributes[_until_zero(name)] = texts if shape else "".join(texts)
        return attributes

    def _variable_text(self, data: bytes) -> str:
        length, heap, entry = struct.unpack("<IQI", data)
        magic, size = self._numbers("<4s4xQ", heap)
        if magic != b"GCOL":
            raise ValueError("a text attribute is missing")
        at = 16
        while at + 16 <= size:
            self._count()
            index, stored = self._numbers("<H6xQ", heap + at)
            if index == entry:
                return self._bytes(heap + at + 16, min(length, stored)).decode()
            if not index:
                break
            at += 16 + -(-stored // 8) * 8
        raise ValueError("a text attribute is missing")


def _until_zero(text: bytes) -> str:
    return text.partition(b"\0")[0].decode()


def _shape(space: bytes) -> tuple[int, ...]:
    version, rank = space[:2]
    if version in (1, 2) and rank <= 32:
        shape = struct.unpack_from(f"<{rank}Q", space, 8 if version == 1 else 4)
        if all(size < 1 << 48 for size in shape):
            return shape
    raise ValueError("an array has an impossible shape")


def _type(stored: bytes) -> np.dtype:
    """Return a number type: integer, floating-point, or boolean as an enumeration."""
    type_class, (order, _, _), size = stored[0] & 15, stored[1:4], struct.unpack_from("<I", stored, 4)[0]
    if type_class == 0 and not order & 1 and size in (1, 2, 4, 8):
        return np.dtype(f"{'i' if order & 8 else 'u'}{size}")
    if type_class == 1 and not order & 65 and size in (2, 4, 8):
        is_wide = size == 2 and stored[13] == 8
        return np.dtype(ml_dtypes.bfloat16) if is_wide else np.dtype(f"f{size}")
    if type_class == 8 and size == 1:
        return np.dtype(np.bool_)
    raise ValueError("an array has a type that Keras does not write")
