"""A shuffled order that is a function, not a list: which row comes at a position is computed, not stored.

A permutation of any number of rows costs no memory, and depends on nothing but the seed and the epoch: not on the
version of a library, and not on what was drawn before. It is a Feistel network: rows are laid out as a grid of `high`
by `low`, and each round shifts one coordinate by a hash of the other, which can be undone and so maps no two positions
to one. The grid is hardly larger than the number of rows; a position that leads outside of them is followed further
until it comes back.
"""

from __future__ import annotations

import math

import numpy as np

_MASK = 2**64 - 1
_ROUNDS = 10


class Order:
    """Order(n, seed, epoch)(positions): the rows at these positions of a shuffle of 0 to n - 1."""

    def __init__(self, count: int, seed: int, epoch: int):
        self._count = count
        self._low = np.uint64(max(math.isqrt(count), 1))
        self._high = np.uint64(-(-count // int(self._low)))
        key = _mix(_mix(seed & _MASK) ^ (epoch & _MASK))
        self._keys = [np.uint64(key := _mix(key)) for _ in range(_ROUNDS)]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        rows = self._permute(positions.astype(np.uint64))
        while (outside := np.flatnonzero(rows >= self._count)).size:
            rows[outside] = self._permute(rows[outside])
        return rows.astype(np.int64)

    def _permute(self, positions: np.ndarray) -> np.ndarray:
        high, low = np.divmod(positions, self._low)
        for first, second in zip(self._keys[::2], self._keys[1::2], strict=True):
            high = (high + _hash(low ^ first) % self._high) % self._high
            low = (low + _hash(high ^ second) % self._low) % self._low
        return high * self._low + low


def _mix(number: int) -> int:
    """The next number of the generator SplitMix64 whose state is `number`."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def _hash(numbers: np.ndarray) -> np.ndarray:
    """The last three steps of `_mix`, for arrays."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
