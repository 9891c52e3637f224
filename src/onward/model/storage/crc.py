"""CRC-32C, which TensorFlow's files have for every tensor: many pieces side by side, then put together."""

from __future__ import annotations

from functools import cache
from typing import BinaryIO

import numpy as np

_POLYNOMIAL = 0x82F63B78
_LANE = 256
"""Bytes that are gone through one after the other; all lanes of a block at once."""
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
    """What becomes of the lower and of the upper half of a register after four bytes."""
    bits = [np.array([_shift(1 << bit + upper, 32) for bit in range(16)], np.uint32) for upper in (0, 16)]
    halves = np.arange(1 << 16, dtype=np.uint32)
    low, high = (
        np.bitwise_xor.reduce([np.where(halves >> bit & 1, columns[bit], 0) for bit in range(16)]).astype(np.uint32)
        for columns in bits
    )
    return low, high


@cache
def _zeros(power: int) -> np.ndarray:
    """What becomes of each bit of a register after 2**power bytes of zeros."""
    if not power:
        return np.array([_shift(1 << bit, 8) for bit in range(32)], np.uint32)
    half = _zeros(power - 1)
    return _after(half, half)


def _after(columns: np.ndarray, registers: np.ndarray) -> np.ndarray:
    made = np.zeros_like(registers)
    for bit in range(32):
        made ^= np.where(registers >> np.uint32(bit) & np.uint32(1), columns[bit], np.uint32(0))
    return made


def _append_zeros(register: int, length: int) -> int:
    """A register after so many bytes of zeros."""
    found, power = np.array([register], np.uint32), 0
    while length >> power:
        if length >> power & 1:
            found = _after(_zeros(power), found)
        power += 1
    return int(found[0])


def _block(data: np.ndarray) -> int:
    """The register after a power of two of lanes, from zero."""
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
    """The checksum of data, after what `register` is the checksum of."""
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
    """As it is stored, so that data that holds checksums has one that is no accident."""
    return ((checksum >> 15 | checksum << 17) + _MASK) & 0xFFFFFFFF


class Summed:
    """A file that is written to, with the checksum of what was written since the last time somebody asked."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._checksum = 0

    def write(self, data: bytes | memoryview) -> int:
        self._checksum = crc32c(data, self._checksum)
        return self._file.write(data)

    def take(self) -> int:
        found, self._checksum = self._checksum, 0
        return mask(found)
