"""Samples one by one, in a list or an object that has them by number; and streams of batches, as they come."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onward.errors import DataError
from onward.training.data.dataset import Batch, Column, check_not_empty, known_columns, to_array


def parts_by_name(item: Any) -> dict[str, Any]:
    """The parts of a sample or a batch by name; parts without a name have their position for one."""
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    if isinstance(item, tuple | list):
        return {str(position): value for position, value in enumerate(item)}
    return {"0": item}


class Samples:
    """A data set of samples, fetched one by one and stacked."""

    def __init__(self, samples: Any, origin: str = "the samples"):
        check_not_empty(len(samples), origin)
        self._samples, self._origin = samples, origin
        first = {name: to_array(value, name, origin) for name, value in parts_by_name(samples[0]).items()}
        self.columns = {name: Column(array.dtype, array.shape) for name, array in first.items()}

    def __len__(self) -> int:
        return len(self._samples)

    def take(self, indices: np.ndarray, columns: Sequence[str] | None = None) -> Batch:
        wanted = known_columns(columns, self.columns, self._origin)
        samples = [(int(index), parts_by_name(self._samples[int(index)])) for index in indices]
        return {name: np.stack([self._value(name, *sample) for sample in samples]) for name in wanted}

    def row(self, index: int) -> str:
        return f"sample {index:,}"

    def _value(self, name: str, index: int, sample: dict[str, Any]) -> np.ndarray:
        if name not in sample:
            raise DataError(f"{self.row(index)} has no `{name}`, as sample 0 has")
        column, array = self.columns[name], to_array(sample[name], name, self.row(index))
        if array.shape != column.shape or not np.can_cast(array.dtype, column.dtype, "same_kind"):
            other = Column(array.dtype, array.shape)
            raise DataError(f"`{name}` is {other} in {self.row(index)}, but {column} in sample 0")
        return array.astype(column.dtype, copy=False)


class HubDataset:
    """A `datasets.Dataset` in memory or on disk, asked for whole batches of arrays."""

    def __init__(self, dataset: Any):
        check_not_empty(len(dataset), "the data set")
        self._dataset = dataset.with_format("numpy")
        self._parts: dict[tuple[str, ...], Any] = {}  # the same with some columns: others may be large
        first = _arrays(self._dataset, [0])
        names = {name: _class_names(feature) for name, feature in (getattr(dataset, "features", None) or {}).items()}
        self.columns = {name: Column(a.dtype, a.shape[1:], names.get(name)) for name, a in first.items()}

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, indices: np.ndarray, columns: Sequence[str] | None = None) -> Batch:
        wanted = tuple(known_columns(columns, self.columns, "the data set"))
        if wanted not in self._parts:
            self._parts[wanted] = self._dataset.with_format("numpy", columns=list(wanted))
        arrays = _arrays(self._parts[wanted], indices.tolist())
        for name, array in arrays.items():
            if array.dtype.hasobject:
                raise DataError(f"rows of column `{name}` differ in shape, or are no numbers", hint="pad them")
        return arrays

    def row(self, index: int) -> str:
        return f"row {index:,} of the data set"


def _class_names(feature: Any) -> tuple[str, ...] | None:
    """The names of a `ClassLabel`."""
    names = getattr(feature, "names", None) if type(feature).__name__ == "ClassLabel" else None
    return tuple(names) if names else None


def _arrays(dataset: Any, indices: list[int]) -> Batch:
    return {name: to_array(values, name, "the data set") for name, values in dataset[indices].items()}


# ---- streams: batches that come as they are, in their own order ------------------------------------------------------


class Stream:
    """Batches without random access. The first one is read early, since it tells what the columns are."""

    def __init__(self, source: Iterable[Any] | Callable[..., Iterable[Any]]):
        self._source = source
        self._ready: tuple[int, Batch, Iterator[Batch]] | None = None  # an epoch of which the first batch was read
        batches = self._start(0)
        try:
            first = next(batches)
        except StopIteration:
            raise DataError("the stream of batches is empty") from None
        self._ready = (0, first, batches)
        self.columns = {name: Column(array.dtype, array.shape[1:]) for name, array in first.items()}

    @property
    def batches_per_epoch(self) -> int | None:
        """How many batches an epoch has, where the source says so."""
        try:
            return len(self._source)  # type: ignore[arg-type] # not all have one
        except TypeError:
            return None

    def epoch(self, epoch: int) -> Iterator[Batch]:
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] == epoch:
            yield ready[1]
            yield from ready[2]
        elif isinstance(self._source, Iterator):
            hint = "pass a function that makes the generator, or something that can be iterated again"
            raise DataError(f"the stream of batches has ended, and epoch {epoch} needs it again", hint=hint)
        else:
            yield from self._start(epoch)

    def _start(self, epoch: int) -> Iterator[Batch]:
        source = self._source
        if isinstance(source, Iterable):
            items = source
        elif _takes_epoch(source):
            items = source(epoch)
        else:
            items = source()
        if not isinstance(items, Iterable):
            hint = "let it return a generator, or a list of batches"
            raise DataError(f"the function gives an object of type `{type(items).__name__}`, not batches", hint=hint)
        for number, item in enumerate(items):
            yield _batch(item, number)


def _takes_epoch(function: Callable[..., Any]) -> bool:
    """Whether a function must be given something: the epoch, on which the order of samples may depend."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.kind in kinds and one.default is inspect.Parameter.empty for one in parameters)


def _batch(item: Any, number: int) -> Batch:
    """A batch of our own: batches are read ahead, and a source may write the next one where the last one was."""
    batch = {name: np.array(to_array(value, name, f"batch {number:,}")) for name, value in parts_by_name(item).items()}
    lengths = {name: array.shape[0] if array.shape else None for name, array in batch.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        hint = "each item of a stream is a batch: arrays whose first dimension counts samples"
        raise DataError(f"batch {number:,} has no common number of samples: {lengths}", hint=hint)
    return batch
