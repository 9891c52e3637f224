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


class WindowOrder:
    """An order for rows that are read in pieces: pieces are shuffled, then the rows within a window of them.

    A window holds as many whole batches as fit. It is cut into a stretch for each sample of a batch, and each batch
    takes one row of every stretch: sample i of all batches is from stretch i. So a process, whose part of a batch is
    some samples in a row, needs that part of the window alone, and the order is the same for any number of processes.

    `starts` are the first row of each piece, and the number of all rows.
    """

    def __init__(self, starts: np.ndarray, window: int, batch: int, seed: int, epoch: int):
        pieces = Order(len(starts) - 1, seed, epoch)(np.arange(len(starts) - 1))
        self._first = starts[pieces]  # the first row of each piece, in their order
        self._begin = np.concatenate([[0], np.cumsum(starts[pieces + 1] - starts[pieces])])
        self._count, self._batch = int(starts[-1]), batch
        self._window = max(window // batch, 1) * batch
        self._seed, self._epoch = seed, epoch
        self._known = (-1, np.empty(0, np.int64))  # a window, and the places in it

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        windows, at = np.divmod(positions, self._window)
        places = np.empty(len(positions), np.int64)
        for window in np.unique(windows).tolist():
            here = windows == window
            places[here] = window * self._window + self._places(window)[at[here]]
        piece = np.searchsorted(self._begin, places, side="right") - 1
        return self._first[piece] + places - self._begin[piece]

    def _places(self, window: int) -> np.ndarray:
        """Which place in a window each of its positions has. What does not fill a batch comes last, as it is."""
        if self._known[0] != window:
            count = min(self._window, self._count - window * self._window)
            each = count // self._batch  # rows in a stretch, each of which is in another batch
            whole = each * self._batch
            luck = hash_numbers(np.arange(whole), self._seed, self._epoch, window)
            order = np.argsort(luck.reshape(self._batch, each), axis=1, kind="stable")
            order += np.arange(self._batch)[:, None] * each
            self._known = (window, np.concatenate([order.T.ravel(), np.arange(whole, count)]))
        return self._known[1]


def hash_numbers(numbers: np.ndarray, *keys: int) -> np.ndarray:
    """A number of 64 bits for each, which is another for other keys."""
    key = 0
    for one in keys:
        key = _mix(key ^ (one & _MASK))
    return _hash((numbers.astype(np.uint64) + np.uint64(key)) * np.uint64(0x9E3779B97F4A7C15))


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
