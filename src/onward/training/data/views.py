"""Data sets made of others: files one after the other, columns side by side, and the two parts of a split."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

from onward.errors import DataError
from onward.training.data.dataset import Batch, Dataset, known
from onward.training.data.order import Order
from onward.training.data.streams import Stream


def joined(parts: Sequence[Dataset], origin: str) -> Dataset:
    """The rows of all parts, one part after the other."""
    return parts[0] if len(parts) == 1 else _Joined(parts, origin)


class _Joined:
    def __init__(self, parts: Sequence[Dataset], origin: str):
        self.columns = parts[0].columns
        self._parts, self._origin = parts, origin
        self._starts = [0, *itertools.accumulate(len(part) for part in parts)]
        for part in parts[1:]:
            for name in {**self.columns, **part.columns}:
                mine, other = (columns.get(name) for columns in (self.columns, part.columns))
                if mine is None or other is None or (mine.dtype, mine.shape) != (other.dtype, other.shape):
                    where = f"{parts[0].row(0)} and {part.row(0)}"
                    raise DataError(f"files do not go together: column `{name}` is {mine} and {other} ({where})")
                if mine.classes != other.classes:
                    raise DataError(f"files do not go together: column `{name}` has other classes at {part.row(0)}")

    def __len__(self) -> int:
        return self._starts[-1]

    def take(self, indices: np.ndarray, columns: Sequence[str] | None = None) -> Batch:
        names = known(columns, self.columns, self._origin)
        places = np.searchsorted(self._starts, indices, side="right") - 1
        out: Batch = {}
        for place in np.unique(places):
            here = np.flatnonzero(places == place)
            for name, values in self._parts[place].take(indices[here] - self._starts[place], names).items():
                if name not in out:
                    out[name] = np.empty((len(indices), *values.shape[1:]), values.dtype)
                out[name][here] = values
        return out

    def row(self, index: int) -> str:
        place = bisect_right(self._starts, index) - 1
        return self._parts[place].row(index - self._starts[place])


class Beside:
    """Columns of several data sets as one: {name: (data set, its name there)}."""

    def __init__(self, sources: Mapping[str, tuple[Dataset, str]]):
        lengths = {name: len(data) for name, (data, _) in sources.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"`{name}` has {length:,}" for name, length in lengths.items())
            raise DataError(f"columns differ in their number of rows: {listed}")
        self._sources = sources
        self._length = next(iter(lengths.values()))
        self.columns = {name: data.columns[there] for name, (data, there) in sources.items()}

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray, columns: Sequence[str] | None = None) -> Batch:
        out: Batch = {}
        for name in known(columns, self.columns, "the data"):
            data, there = self._sources[name]
            out[name] = data.take(indices, [there])[there]
        return out

    def row(self, index: int) -> str:
        return " and ".join(dict.fromkeys(data.row(index) for data, _ in self._sources.values()))


class Subset:
    """Some rows of a data set: those that an order puts at `start` to `stop`."""

    def __init__(self, data: Dataset, order: Order, start: int, stop: int):
        self.columns = data.columns
        self._data, self._order, self._start, self._stop = data, order, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def take(self, indices: np.ndarray, columns: Sequence[str] | None = None) -> Batch:
        return self._data.take(self._order(indices + self._start), columns)

    def row(self, index: int) -> str:
        return self._data.row(int(self._order(np.array([index + self._start]))[0]))


def split(data: Dataset | Stream, fraction: float, seed: int = 0) -> tuple[Dataset, Dataset]:
    """The data in two parts, to train on and to validate with; `fraction` is the second's share. Both have rows."""
    if isinstance(data, Stream):
        raise DataError("a stream of batches cannot be split", hint="give validation data of their own")
    if not 0 < fraction < 1:
        raise DataError(f"a validation split of {fraction} leaves nothing", hint="use a fraction between 0 and 1")
    count = len(data)
    if count < 2:
        raise DataError("one row cannot be split in two", hint="give validation data of their own")
    held_out = min(max(round(count * fraction), 1), count - 1)
    order = Order(count, seed, _SPLIT)
    return Subset(data, order, held_out, count), Subset(data, order, 0, held_out)


_SPLIT = 2**64 - 1  # takes the place of the epoch, which is never that large
