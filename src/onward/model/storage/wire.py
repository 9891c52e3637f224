"""Protocol buffer encoding for small messages without their classes, and TensorFlow's CRC-32C."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from typing import BinaryIO

import numpy as np

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST = 10
"""Maximum bytes of a varint."""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number, and the offset behind it."""
    number = 0
    for index in range(_LONGEST):
        if at + index >= len(data):
            raise ValueError("it ends within a number")
        byte = data[at + index]
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number & (1 << 64) - 1, at + index + 1
    raise ValueError(f"it has a varint longer than {_LONGEST} bytes")


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Return the fields of a message: number -> integer or bytes."""
    for number, wire_type, begin, end in spans(data):
        if wire_type == _BYTES:
            yield number, data[begin:end]
        elif wire_type == _VARINT:
            yield number, read_varint(data, begin)[0]
        else:
            yield number, int.from_bytes(data[begin:end], "little")


def spans(data: bytes, at: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int, int]]:
    """Yield the fields of the message in a range: number, wire type, start and end of the value."""
    end = len(data) if end is None else end
    while at < end:
        tag, at = read_varint(data, at)
        wire_type = tag & 7
        if wire_type == _VARINT:
            length = read_varint(data, at)[1] - at
        elif wire_type == _BYTES:
            length, at = read_varint(data, at)
        elif wire_type in (_FIXED32, _FIXED64):
            length = 4 if wire_type == _FIXED32 else 8
        else:
            raise ValueError("it has a field of an unknown wire type")
        if at + length > end:
            raise ValueError("it ends within a field")
        yield tag >> 3, wire_type, at, at + length
        at += length


def messages(data: bytes, span: tuple[int, int], *path: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of messages or bytes at a path of field numbers in a message."""
    if not path:
        yield span
        return
    for number, wire_type, begin, end in spans(data, *span):
        if number == path[0] and wire_type == _BYTES:
            yield from messages(data, (begin, end), *path[1:])


def texts(data: bytes, number: int) -> Iterator[bytes]:
    """Return the values of a field of bytes, text or messages."""
    return (value for field_number, value in fields(data) if field_number == number and isinstance(value, bytes))


def numbers(data: bytes) -> dict[int, int]:
    """Return the integer fields; the last of each counts."""
    return {number: value for number, value in fields(data) if isinstance(value, int)}


def text(data: bytes, number: int) -> str:
    return next(texts(data, number), b"").decode("utf-8", "replace")


def as_signed(number: int) -> int:
    """Return a 64-bit number as signed."""
    return number - (1 << 64) if number >> 63 else number


# ---- writing ---------------------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def field(number: int, value: int | bytes) -> bytes:
    """Encode a field; 0 is left out, as the encoding does."""
    if isinstance(value, bytes):
        return varint(number << 3 | _BYTES) + varint(len(value)) + value
    return varint(number << 3 | _VARINT) + varint(value) if value else b""


def fixed_field(number: int, form: str, value: float) -> bytes:
    """Encode a field of four or eight bytes in a `struct` format: `<I`, `<f`, `<d`."""
    data = struct.pack(form, value)
    return varint(number << 3 | (_FIXED32 if len(data) == 4 else _FIXED64)) + data


# ---- CRC-32C ---------------------------------------------------------------------------------------------------------


_POLYNOMIAL = 0x82F63B78
_LANE = 256
"""Bytes per lane, processed one after the other; all lanes of a block at once."""
_MASK = 0xA282EAD8


def _shift(register: int, bits: int) -> int:
    for _ in range(bits):
        register = register >> 1 ^ (_POLYNOMIAL if register & 1 else 0)
    return register


@cache
def _byte_table() -> list[int]:
    return [_shift(byte, 8) for byte in range(256)]


@cache
def _word_tables() -> tuple[np.ndarray, np.ndarray]:
    """Return tables of the register after four bytes, for its lower and its upper half."""
    bits = [np.array([_shift(1 << bit + upper, 32) for bit in range(16)], np.uint32) for upper in (0, 16)]
    halves = np.arange(1 << 16, dtype=np.uint32)
    low, high = (
        np.bitwise_xor.reduce([np.where(halves >> bit & 1, columns[bit], 0) for bit in range(16)]).astype(np.uint32)
        for columns in bits
    )
    return low, high


@cache
def _zeros(power: int) -> np.ndarray:
    """Return the register after 2**power zero bytes, for each bit."""
    if not power:
        return np.array([_shift(1 << bit, 8) for bit in range(32)], np.uint32)
    half = _zeros(power - 1)
    return _after(half, half)


def _after(columns: np.ndarray, registers: np.ndarray) -> np.ndarray:
    result = np.zeros_like(registers)
    for bit in range(32):
        result ^= np.where(registers >> np.uint32(bit) & np.uint32(1), columns[bit], np.uint32(0))
    return result


def _append_zeros(register: int, length: int) -> int:
    registers, power = np.array([register], np.uint32), 0
    while length >> power:
        if length >> power & 1:
            registers = _after(_zeros(power), registers)
        power += 1
    return int(registers[0])


def _block(data: np.ndarray) -> int:
    """Return the register after a power of two of lanes, from zero."""
    low, high = _word_tables()
    words = np.ascontiguousarray(data.view("<u4").reshape(-1, _LANE // 4).T)
    registers = np.zeros(words.shape[1], np.uint32)
    for column in words:
        registers ^= column
        registers = low[registers & np.uint32(0xFFFF)] ^ high[registers >> np.uint32(16)]
    power = _LANE.bit_length() - 1
    while registers.size > 1:
        registers = _after(_zeros(power), registers[0::2]) ^ registers[1::2]
        power += 1
    return int(registers[0])


def crc32c(data: bytes | memoryview, register: int = 0) -> int:
    """Return the checksum of data that continues the checksum `register`."""
    left = np.frombuffer(data, np.uint8)
    register ^= 0xFFFFFFFF
    while left.size >= _LANE:
        length = _LANE << (left.size // _LANE).bit_length() - 1
        register = _append_zeros(register, length) ^ _block(left[:length])
        left = left[length:]
    table = _byte_table()
    for byte in left.tolist():
        register = table[(register ^ byte) & 0xFF] ^ register >> 8
    return register ^ 0xFFFFFFFF


def mask(checksum: int) -> int:
    """Return the stored form of a checksum: data that contain checksums get unlike ones."""
    return ((checksum >> 15 | checksum << 17) + _MASK) & 0xFFFFFFFF


class Summed:
    """A file with a checksum of the bytes written since the last query."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._checksum = 0

    def write(self, data: bytes | memoryview) -> int:
        self._checksum = crc32c(data, self._checksum)
        return self._file.write(data)

    def take(self) -> int:
        checksum, self._checksum = self._checksum, 0
        return mask(checksum)
