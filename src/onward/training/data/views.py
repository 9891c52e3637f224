"""Orders of rows, and views: concatenated, joined, split and relabeled datasets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onward.errors import DataError, suggest
from onward.training.data.dataset import Batch, Dataset, gather
from onward.training.data.objects import Stream

_MASK = 2**64 - 1
_ROUNDS = 10


class Order:
    """A computed shuffle: `Order(n, seed, epoch)(positions)` returns the rows at positions of a
    permutation of range(n).

    It takes no memory and depends on the seed and the epoch only, not on library versions or
    earlier draws. It is a Feistel network: rows are laid out as a grid of `high` by `low`, and each
    round shifts one coordinate by a hash of the other, which is a bijection. A position that leads
    outside the rows is permuted again until it is inside (cycle walking).
    """

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
    """An order for rows in pieces: pieces are shuffled, then rows within a window of pieces.

    A window holds as many full batches as fit. It is cut into a stretch per sample of a batch, and
    each batch takes one row of every stretch: sample i of all batches comes from stretch i. So a
    process, whose shard of a batch is consecutive samples, needs only its part of the window, and
    the order does not depend on the number of processes.

    `starts` are the first row of each piece, and the number of all rows.
    """

    def __init__(self, starts: np.ndarray, window: int, batch: int, seed: int, epoch: int):
        pieces = Order(len(starts) - 1, seed, epoch)(np.arange(len(starts) - 1))
        self._first = starts[pieces]  # the first row of each piece, in their order
        self._begin = np.concatenate([[0], np.cumsum(starts[pieces + 1] - starts[pieces])])
        self._count, self._batch = int(starts[-1]), batch
        self._window = max(window // batch, 1) * batch
        self._seed, self._epoch = seed, epoch
        self._last = (-1, np.empty(0, np.int64))  # the last window and its positions

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        windows, offsets = np.divmod(positions, self._window)
        rows = np.empty(len(positions), np.int64)
        for window in np.unique(windows).tolist():
            mask = windows == window
            rows[mask] = window * self._window + self._places(window)[offsets[mask]]
        piece = np.searchsorted(self._begin, rows, side="right") - 1
        return self._first[piece] + rows - self._begin[piece]

    def _places(self, window: int) -> np.ndarray:
        """Return the order of a window. Rows that do not fill a batch come last, unshuffled."""
        if self._last[0] != window:
            count = min(self._window, self._count - window * self._window)
            stretch = count // self._batch  # rows per stretch, each in another batch
            whole = stretch * self._batch
            luck = hash_numbers(np.arange(whole), self._seed, self._epoch, window)
            order = np.argsort(luck.reshape(self._batch, stretch), axis=1, kind="stable")
            order += np.arange(self._batch)[:, None] * stretch
            self._last = (window, np.concatenate([order.T.ravel(), np.arange(whole, count)]))
        return self._last[1]


def hash_numbers(numbers: np.ndarray, *keys: int) -> np.ndarray:
    """Return a 64-bit hash of each number, which depends on the keys."""
    key = 0
    for number in keys:
        key = _mix(key ^ (number & _MASK))
    return _hash((numbers.astype(np.uint64) + np.uint64(key)) * np.uint64(0x9E3779B97F4A7C15))


def _mix(number: int) -> int:
    """Return the next output of the generator SplitMix64 with state `number`."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def _hash(numbers: np.ndarray) -> np.ndarray:
    """Return the last three steps of `_mix` for arrays."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


# ---- views -----------------------------------------------------------------------------------------------------------


def concatenate(sources: Sequence[Dataset], origin: str) -> Dataset:
    """Return the rows of all datasets in order. Sorted classes are merged."""
    if len(sources) == 1:
        return sources[0]
    for column in sources[0].columns:
        listed = [source.columns[column].classes if column in source.columns else None for source in sources]
        classes = [names for names in listed if names is not None and list(names) == sorted(names)]
        if len(set(listed)) > 1 and len(classes) == len(sources):
            merged = tuple(sorted(set().union(*classes)))
            sources = [with_classes(source, column, merged, origin) for source in sources]
    return _Joined(sources, origin)


class _Joined(Dataset):
    def __init__(self, sources: Sequence[Dataset], origin: str):
        super().__init__(sources[0].columns, sum(map(len, sources)), origin)
        self._sources, self._starts = sources, np.cumsum([0, *map(len, sources)])
        pieces = [start + s.pieces for start, s in zip(self._starts, sources, strict=False) if s.pieces is not None]
        # A dataset without pieces is one piece.
        self.pieces = np.unique(np.concatenate([*pieces, self._starts])) if pieces else None
        if all(source.files is not None for source in sources):
            self.files = [file for source in sources for file in source.files or ()]
        for source in sources[1:]:
            for name in {**self.columns, **source.columns}:
                mine, other = (columns.get(name) for columns in (self.columns, source.columns))
                problem = None
                if mine is None or other is None or (mine.dtype, mine.shape) != (other.dtype, other.shape):
                    problem = f"is {mine} and {other} ({sources[0].row(0)} and {source.row(0)})"
                elif mine.classes != other.classes:
                    problem = f"has other classes at {source.row(0)}"
                if problem:
                    raise DataError(
                        f"files have different columns: `{name}` {problem}",
                        hint="pass files with the same columns, types and classes",
                    )

    def _take(self, indices: np.ndarray, names: Sequence[str]) -> Batch:
        return gather(self._starts, indices, lambda number, rows: self._sources[number].take(rows, names))

    def row(self, index: int) -> str:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._sources[number].row(index - int(self._starts[number]))


class JoinedColumns(Dataset):
    """Columns of several datasets as one dataset: {name: (dataset, its column)}."""

    def __init__(self, sources: Mapping[str, tuple[Dataset, str]]):
        lengths = {name: len(data) for name, (data, _) in sources.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"`{name}` has {length:,}" for name, length in lengths.items())
            raise DataError(f"columns differ in their number of rows: {listed}")
        columns = {name: data.columns[source_column] for name, (data, source_column) in sources.items()}
        super().__init__(columns, next(iter(lengths.values())), "the data")
        self._sources = sources
        pieces = [data.pieces for data, _ in sources.values() if data.pieces is not None]
        self.pieces = np.unique(np.concatenate(pieces)) if pieces else None
        self.files = next((data.files for data, _ in sources.values() if data.files is not None), None)

    def _take(self, indices: np.ndarray, names: Sequence[str]) -> Batch:
        sources = {name: self._sources[name] for name in names}
        return {name: data.take(indices, [column])[column] for name, (data, column) in sources.items()}

    def row(self, index: int) -> str:
        return " and ".join(dict.fromkeys(data.row(index) for data, _ in self._sources.values()))


class Subset(Dataset):
    """Selected rows of a dataset: `rows` maps indices here to indices there, pieces in order."""

    def __init__(self, data: Dataset, length: int, rows: Callable[[np.ndarray], np.ndarray]):
        super().__init__(data.columns, length, data.origin)
        self._data, self._rows = data, rows
        self.pieces = None if data.pieces is None else np.unique(_first_not_below(data.pieces, rows, length))

    def _take(self, indices: np.ndarray, names: Sequence[str]) -> Batch:
        return self._data.take(self._rows(indices), names)

    def row(self, index: int) -> str:
        return self._data.row(int(self._rows(np.array([index]))[0]))


def _first_not_below(limits: np.ndarray, rows: Callable[[np.ndarray], np.ndarray], length: int) -> np.ndarray:
    """Return `np.searchsorted(rows, limits)` for ascending rows that are a function."""
    low, high = np.zeros_like(limits), np.full_like(limits, length)
    while (low < high).any():
        middle = np.minimum((low + high) // 2, length - 1)
        is_below = (rows(middle) < limits) & (low < high)
        low, high = np.where(is_below, middle + 1, low), np.where(is_below, high, np.minimum(high, middle))
    return low


def with_classes(data: Dataset, column: str, classes: tuple[str, ...], origin: str) -> Dataset:
    """Return data in which a column has the classes of `origin`, with the same numbers."""
    mine = data.columns[column].classes
    if mine == classes:
        return data
    if mine is None:
        raise DataError(
            f"column `{column}` has numbers, but class names in {origin}, such as `{classes[0]}`",
            hint="write classes the same way in both",
        )
    unknown = [name for name in mine if name not in classes]
    if unknown:
        raise DataError(
            f"column `{column}` has the class `{unknown[0]}`, which is not in {origin}",
            hint=suggest(unknown[0], classes) or f"classes are {', '.join(classes[:10])}",
        )
    return _Renumbered(data, column, classes)


class _Renumbered(Dataset):
    """A dataset whose class numbers are those of another."""

    def __init__(self, data: Dataset, column: str, classes: tuple[str, ...]):
        old = data.columns[column]
        super().__init__({**data.columns, column: dataclasses.replace(old, classes=classes)}, len(data), data.origin)
        self.pieces, self.files = data.pieces, data.files
        self._data, self._column = data, column
        self._numbers = np.array([classes.index(name) for name in old.classes or ()], old.dtype)

    def _take(self, indices: np.ndarray, names: Sequence[str]) -> Batch:
        batch = self._data.take(indices, names)
        if (labels := batch.get(self._column)) is not None:  # other numbers, such as -1 for no class, stay
            is_class = (labels >= 0) & (labels < len(self._numbers))
            batch[self._column] = np.where(is_class, self._numbers[np.where(is_class, labels, 0)], labels)
        return batch

    def row(self, index: int) -> str:
        return self._data.row(index)


# ---- splits ----------------------------------------------------------------------------------------------------------


def split(
    data: Dataset | Stream, fraction: float, seed: int = 0, strata: np.ndarray | None = None
) -> tuple[Dataset, Dataset]:
    """Return the training and the validation part of the data, neither of them empty.

    `fraction` is the size of the validation part. `strata` has a number per row, such as its class:
    the fraction holds for each of them.
    """
    if isinstance(data, Stream):
        raise DataError("cannot split a stream of batches", hint="pass separate validation data: `validation=...`")
    if not 0 < fraction < 1:
        raise DataError(f"the validation fraction is {fraction}", hint="use a fraction between 0 and 1")
    count = len(data)
    if count < 2:
        raise DataError("cannot split one row", hint="pass separate validation data: `validation=...`")
    held_out = min(max(round(count * fraction), 1), count - 1)
    order = Order(count, seed, _SPLIT)
    if strata is None and data.pieces is not None:
        spread = _Spread(count, held_out, seed)
        return Subset(data, count - held_out, spread.others), Subset(data, held_out, spread.chosen)
    if strata is None:
        first = Subset(data, count - held_out, lambda rows: order(rows + held_out))
        return first, Subset(data, held_out, order)
    return _parts(data, _stratified_rows(strata, held_out, order))


def fold(
    data: Dataset | Stream, number: int, folds: int, seed: int = 0, strata: np.ndarray | None = None
) -> tuple[Dataset, Dataset]:
    """Return the data without fold `number`, counted from 1, and that fold.

    Rows are dealt like cards, stratum by stratum, so the sizes of folds differ by at most one row.
    """
    if isinstance(data, Stream):
        raise DataError("cannot divide a stream of batches into folds", hint="pass files or arrays")
    if not 1 <= number <= folds:
        raise DataError(f"fold {number} of {folds} does not exist", hint=f"folds are counted from 1 to {folds}")
    if len(data) < folds:
        raise DataError(f"cannot divide {len(data)} rows into {folds} folds", hint="use fewer folds")
    shuffled = Order(len(data), seed, _SPLIT)(np.arange(len(data)))
    if strata is not None:
        shuffled = shuffled[np.argsort(strata[shuffled], kind="stable")]
    is_held_out = np.zeros(len(data), bool)
    is_held_out[shuffled[number - 1 :: folds]] = True
    return _parts(data, is_held_out)


def _parts(data: Dataset, is_held_out: np.ndarray) -> tuple[Dataset, Dataset]:
    rows = [np.flatnonzero(chosen) for chosen in (~is_held_out, is_held_out)]
    first, second = (Subset(data, len(selected), selected.__getitem__) for selected in rows)
    return first, second


class _Spread:
    """One row of each of many equal stretches, and the others; both ascend, to keep neighbors."""

    def __init__(self, rows: int, chosen: int, seed: int):
        self._rows, self._chosen, self._seed = rows, chosen, seed

    def _begin(self, stretch: np.ndarray) -> Any:
        return stretch * self._rows // self._chosen

    def chosen(self, stretch: np.ndarray) -> np.ndarray:
        lengths = self._begin(stretch + 1) - self._begin(stretch)
        offsets = hash_numbers(stretch, self._seed, _SPLIT) % lengths.astype("u8")
        return np.asarray(self._begin(stretch) + offsets.astype(np.int64))

    def others(self, number: np.ndarray) -> np.ndarray:
        remaining = self._rows - self._chosen
        stretch = -(-(number + 1) * self._chosen // remaining) - 1  # the last with at most `number` rows before it
        row = number + stretch  # if its chosen row comes later
        return np.asarray(row + (row >= self.chosen(stretch)))


_SPLIT = 2**64 - 1  # used as the epoch, which is never that large


def _stratified_rows(strata: np.ndarray, held_out: int, order: Order) -> np.ndarray:
    """Return the rows to hold out: of each stratum its share, the first ones in the order."""
    _, numbers, counts = np.unique(strata, return_inverse=True, return_counts=True)
    shares = counts * (held_out / len(strata))
    quotas = np.floor(shares).astype(np.int64)
    largest_rest = np.argsort(quotas - shares, kind="stable")
    quotas[largest_rest[: held_out - quotas.sum()]] += 1
    shuffled = order(np.arange(len(strata)))
    by_stratum = shuffled[np.argsort(numbers[shuffled], kind="stable")]
    starts = np.cumsum(counts) - counts
    rank = np.arange(len(strata)) - np.repeat(starts, counts)
    chosen = np.zeros(len(strata), bool)
    chosen[by_stratum[rank < np.repeat(quotas, counts)]] = True
    return chosen
