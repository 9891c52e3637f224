"""The encoding of protocol buffers, as far as it is needed to read and write small messages without their classes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST = 10
"""Bytes of a varint."""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next thing begins."""
    number = 0
    for index in range(_LONGEST):
        if at + index >= len(data):
            raise ValueError("it ends within a number")
        byte = data[at + index]
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number & (1 << 64) - 1, at + index + 1
    raise ValueError("it has a number that is too long")


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: a number or bytes under each of their numbers."""
    for number, kind, begin, end in spans(data):
        if kind == _BYTES:
            yield number, data[begin:end]
        elif kind == _VARINT:
            yield number, read_varint(data, begin)[0]
        else:
            yield number, int.from_bytes(data[begin:end], "little")


def spans(data: bytes, at: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int, int]]:
    """The fields of the message between two places: their numbers, kinds, and where the value begins and ends."""
    end = len(data) if end is None else end
    while at < end:
        tag, at = read_varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            length = read_varint(data, at)[1] - at
        elif kind == _BYTES:
            length, at = read_varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError("it has a field of a kind that there is not")
        if at + length > end:
            raise ValueError("it ends within a field")
        yield tag >> 3, kind, at, at + length
        at += length


def messages(data: bytes, span: tuple[int, int], *path: int) -> Iterator[tuple[int, int]]:
    """Where messages or bytes are that a path of numbers leads to, from the message at a span."""
    if not path:
        yield span
        return
    for number, kind, begin, end in spans(data, *span):
        if number == path[0] and kind == _BYTES:
            yield from messages(data, (begin, end), *path[1:])


def texts(data: bytes, number: int) -> Iterator[bytes]:
    """The values of a field that is bytes, a text or a message."""
    return (value for found, value in fields(data) if found == number and isinstance(value, bytes))


def numbers(data: bytes) -> dict[int, int]:
    """Fields that are numbers; of each the last."""
    return {number: value for number, value in fields(data) if isinstance(value, int)}


def text(data: bytes, number: int) -> str:
    return next(texts(data, number), b"").decode("utf-8", "replace")


def as_signed(number: int) -> int:
    """A number of 64 bits that may be below zero."""
    return number - (1 << 64) if number >> 63 else number


# ---- writing ---------------------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def field(number: int, value: int | bytes) -> bytes:
    """A field; one that is 0 is left out, as the encoding has it."""
    if isinstance(value, bytes):
        return varint(number << 3 | _BYTES) + varint(len(value)) + value
    return varint(number << 3 | _VARINT) + varint(value) if value else b""


def fixed_field(number: int, form: str, value: float) -> bytes:
    """A field of four or eight bytes, in a form of `struct`: `<I`, `<f`, `<d`."""
    data = struct.pack(form, value)
    return varint(number << 3 | (_FIXED32 if len(data) == 4 else _FIXED64)) + data
