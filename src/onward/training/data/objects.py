"""Objects of Python as data: samples one by one, data frames, streams of batches, data sets of other libraries."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onward.engines.distributed import Alone, ProcessGroup
from onward.errors import DataError
from onward.training.data.dataset import (
    MOST_CLASSES,
    Batch,
    Column,
    Columns,
    check_names,
    check_not_empty,
    known_columns,
    to_array,
)


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
        self.is_plain = type(samples) in (list, tuple)  # not an object whose code makes them
        first = {name: to_array(value, name, origin) for name, value in parts_by_name(samples[0]).items()}
        self.columns = {name: Column(array.dtype, array.shape, is_costly=True) for name, array in first.items()}

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


# ---- data frames of pandas -------------------------------------------------------------------------------------------
# Columns are what they would be in a CSV file: numbers, or text, which becomes the numbers of its classes. Categories
# keep their order. Cells that hold arrays are stacked.


def is_frame(source: Any) -> bool:
    kind = type(source)
    return kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] == "pandas"


def open_frame(frame: Any) -> Columns:
    check_names(map(str, frame.columns), "the data frame")
    arrays: dict[str, np.ndarray] = {}
    described: dict[str, dict[str, Any]] = {}
    for position, label in enumerate(frame.columns):
        series, name = frame.iloc[:, position], str(label)
        array, remarks = _column(series, name)
        arrays[name], described[name] = array, remarks
    data = Columns(arrays, "the data frame")
    data.columns = {name: dataclasses.replace(data.columns[name], **remarks) for name, remarks in described.items()}
    return data


def _column(series: Any, name: str) -> tuple[np.ndarray, dict[str, Any]]:
    """The values of a column, and what is to be said about it as a `Column`."""
    kind = getattr(series.dtype, "kind", "O")
    if kind == "f":
        return series.to_numpy(np.dtype(f"f{series.dtype.itemsize}"), na_value=np.nan), {}
    if (missing := series.isna().to_numpy()).any():
        return _text(series), {"remark": f"no value in row {int(missing.argmax()):,}"}
    if series.dtype.name == "category":
        codes, categories = series.cat.codes.to_numpy().astype(np.int64), series.cat.categories
        return codes, {"classes": tuple(map(str, categories))}
    if kind in "iub":
        return series.to_numpy(np.dtype(bool if kind == "b" else f"{kind}{series.dtype.itemsize}")), {}
    cells = series.tolist()
    if all(isinstance(cell, str) for cell in cells):
        classes, codes = np.unique(np.asarray(cells, object), return_inverse=True)
        if len(classes) <= MOST_CLASSES:
            return codes.astype(np.int64), {"classes": tuple(classes.tolist())}
    elif all(isinstance(cell, np.ndarray | list) for cell in cells):
        return np.stack([to_array(cell, name, "the data frame") for cell in cells]), {}
    return _text(series), {"remark": str(series.dtype)}


def _text(series: Any) -> np.ndarray:
    """What cannot be trained on, and is only named."""
    return np.asarray(series.astype(str).tolist(), str)


_ALONE = Alone()


class Stream:
    """Batches as they come. The first one is read early, since it tells what the columns are.

    All processes read the same, and each keeps its part of every batch. Of a function that takes `rank` and `size`, and
    of a DataLoader with a `DistributedSampler`, each gets its part as it is.
    """

    is_divided: bool
    """Whether a process gets from it what is its own alone. The first process that has no more ends the epoch."""
    _part: tuple[int | None, int] | None = None
    """The number of the process whose part it is, where that is known, and of how many."""

    def __init__(self, source: Iterable[Any] | Callable[..., Iterable[Any]]):
        self._source = source
        parameters = [] if isinstance(source, Iterable) else _parameters(source)
        self._takes_rank = {"rank", "size"} <= {one.name for one in parameters}
        self._sampler: Any = getattr(source, "sampler", None)
        if (parts := getattr(self._sampler, "num_replicas", None)) is not None:
            self._part = (getattr(self._sampler, "rank", None), parts)
        self.is_divided = self._takes_rank or self._part is not None
        self._takes_epoch = any(one.default is one.empty for one in parameters if one.name not in ("rank", "size"))
        self._ready: tuple[int, Batch, Iterator[Batch]] | None = None  # an epoch of which the first batch was read
        batches = self._start(0, _ALONE)
        first = self._describe(batches)
        self._ready = (0, first, batches)

    def _describe(self, batches: Iterator[Batch]) -> Batch:
        """Say what the columns are, by the first batch."""
        first = next(batches, None)
        if first is None:
            raise DataError("the stream of batches is empty")
        self.columns = {name: Column(array.dtype, array.shape[1:]) for name, array in first.items()}
        return first

    @property
    def batches_per_epoch(self) -> int | None:
        """How many batches an epoch has, where the source says so."""
        try:
            return len(self._source)  # type: ignore[arg-type] # not all have one
        except TypeError:
            return None

    def epoch(
        self, epoch: int, start: int = 0, *, size: int = 1, drop: bool = False, group: ProcessGroup = _ALONE
    ) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on. `size` and `drop` are for those who are asked for a size."""
        self._check_part(group)
        ready, self._ready = self._ready, None
        is_same = ready is not None and ready[0] == epoch and (group.size == 1 or not self._takes_rank)
        if ready is not None and is_same:
            batches: Iterator[Batch] = itertools.chain([ready[1]], ready[2])
        elif isinstance(self._source, Iterator):
            hint = "pass a function that makes the generator, or something that can be iterated again"
            raise DataError(f"the stream of batches has ended, and epoch {epoch} needs it again", hint=hint)
        else:
            batches = self._start(epoch, group)
        yield from itertools.islice(batches, start, None)

    def _check_part(self, group: ProcessGroup) -> None:
        if self._part not in (None, (None, group.size), (group.rank, group.size)):
            rank, parts = self._part or (0, 1)
            which = f"one of {parts} parts" if rank is None else f"part {rank} of {parts}"
            message = f"the data are {which}, and this is process {group.rank} of {group.size}"
            raise DataError(message, hint="divide it by the number of processes, or give the whole to each")

    def _start(self, epoch: int, group: ProcessGroup) -> Iterator[Batch]:
        source = self._source
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        if isinstance(source, Iterable):
            items = source
        else:
            own = {"rank": group.rank, "size": group.size} if self._takes_rank else {}
            items = source(epoch, **own) if self._takes_epoch else source(**own)
        if not isinstance(items, Iterable):
            hint = "let it return a generator, or a list of batches"
            raise DataError(f"the function gives an object of type `{type(items).__name__}`, not batches", hint=hint)
        for number, item in enumerate(items):
            yield _batch(item, number)


class SizedStream(Stream):
    """Samples that come one after the other, in batches of the size that is asked for."""

    def __init__(self, part: tuple[int | None, int] | None):
        self._part, self.is_divided = part, part is not None
        self._describe(self._batches(0, 1, 0, False))

    @property
    def batches_per_epoch(self) -> int | None:
        return None

    def epoch(
        self, epoch: int, start: int = 0, *, size: int = 1, drop: bool = False, group: ProcessGroup = _ALONE
    ) -> Iterator[Batch]:
        self._check_part(group)
        own = len(range(size)[group.share(size)]) if self.is_divided else size
        return self._batches(epoch, own, start * own, drop)

    @abstractmethod
    def _open(self, epoch: int, size: int, skipped: int, drop: bool) -> Iterable[Any]:
        """Batches of so many samples, after those that are skipped; `drop` the last one if it is smaller."""

    def _batches(self, epoch: int, size: int, skipped: int, drop: bool) -> Iterator[Batch]:
        for number, item in enumerate(self._open(epoch, size, skipped, drop), skipped // size):
            yield _batch(item, number)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a function may be given: the epoch, on which the order of samples may depend; `rank` and `size`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    all_of_them = inspect.signature(function).parameters.values()
    return [one for one in all_of_them if one.kind in kinds or one.name in ("rank", "size")]


def _batch(item: Any, number: int) -> Batch:
    """A batch of our own: batches are read ahead, and a source may write the next one where the last one was."""
    batch = {name: np.array(to_array(value, name, f"batch {number:,}")) for name, value in parts_by_name(item).items()}
    lengths = {name: array.shape[0] if array.shape else None for name, array in batch.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        hint = "each item of a stream is a batch: arrays whose first dimension counts samples"
        raise DataError(f"batch {number:,} has no common number of samples: {lengths}", hint=hint)
    return batch


class HubDataset:
    """A `datasets.Dataset` in memory or on disk, asked for whole batches of arrays."""

    def __init__(self, dataset: Any):
        check_not_empty(len(dataset), "the data set")
        self._dataset = dataset.with_format("numpy")
        self._parts: dict[tuple[str, ...], Any] = {}  # the same with some columns: others may be large
        first = _arrays(self._dataset, [0])
        names = _names_of_classes(dataset)
        self.columns = {
            name: Column(a.dtype, a.shape[1:], names.get(name), is_costly=True) for name, a in first.items()
        }

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


def _names_of_classes(dataset: Any) -> dict[str, tuple[str, ...]]:
    """The names of each `ClassLabel`."""
    features = (getattr(dataset, "features", None) or {}).items()
    labels = {name: feature for name, feature in features if type(feature).__name__ == "ClassLabel"}
    return {name: tuple(label.names) for name, label in labels.items() if getattr(label, "names", None)}


def _arrays(dataset: Any, indices: list[int]) -> Batch:
    return {name: to_array(values, name, "the data set") for name, values in dataset[indices].items()}


# ---- data sets that are streamed -------------------------------------------------------------------------------------


class HubStream(SizedStream):
    """A `datasets.IterableDataset`. What `split_dataset_by_node` made of one is a process's own part."""

    def __init__(self, dataset: Any):
        self._dataset = dataset.with_format("numpy")
        nodes = getattr(dataset, "_distributed", None)
        super().__init__(None if nodes is None else (nodes.rank, nodes.world_size))
        names = _names_of_classes(dataset)
        self.columns = {name: dataclasses.replace(one, classes=names.get(name)) for name, one in self.columns.items()}

    def _open(self, epoch: int, size: int, skipped: int, drop: bool) -> Iterable[Any]:
        rest = self._dataset.skip(skipped) if skipped else self._dataset
        rest.set_epoch(epoch)  # on which the order depends, if it is shuffled
        batches: Iterable[Any] = rest.iter(size, drop_last_batch=drop)
        return batches


def is_ray(source: Any) -> bool:
    return type(source).__module__.startswith("ray.") and hasattr(source, "iter_batches")


class RayStream(SizedStream):
    """A `ray.data.Dataset`, or a part of one: what `get_dataset_shard` gives a worker, or `streaming_split`."""

    def __init__(self, dataset: Any):
        self._dataset = dataset
        if hasattr(dataset, "context"):  # else blocks come as they are ready, in another order each time
            dataset.context.execution_options.preserve_order = True
        super().__init__((None, dataset.world_size()) if hasattr(dataset, "world_size") else None)

    def _open(self, epoch: int, size: int, skipped: int, drop: bool) -> Iterable[Any]:
        batches = self._dataset.iter_batches(batch_size=size, batch_format="numpy", drop_last=drop)
        return itertools.islice(batches, skipped // size, None)
