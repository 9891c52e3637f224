"""Python objects as data: samples, data frames, streams of batches, datasets of other libraries."""

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
    Dataset,
    check_names,
    to_array,
)


def arrays_by_name(item: Any) -> dict[str, Any]:
    """Return the columns of a sample or a batch. Unnamed ones are named by position."""
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    if isinstance(item, tuple | list):
        return {str(position): value for position, value in enumerate(item)}
    return {"0": item}


class Samples(Dataset):
    """A dataset of samples, fetched one by one and stacked."""

    def __init__(self, samples: Any):
        super().__init__({}, len(samples), "the samples")
        self._samples = samples
        self.is_plain = type(samples) in (list, tuple)  # not made by user code
        first = {name: to_array(value, name, self.origin) for name, value in arrays_by_name(samples[0]).items()}
        self.columns = {name: Column(array.dtype, array.shape, is_costly=True) for name, array in first.items()}

    def _take(self, indices: np.ndarray, names: Sequence[str]) -> Batch:
        samples = [(int(index), arrays_by_name(self._samples[int(index)])) for index in indices]
        return {name: np.stack([self._value(name, *sample) for sample in samples]) for name in names}

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


# ---- pandas data frames ----------------------------------------------------------------------------------------------
# Columns are as in a CSV file: numbers, or text, which becomes class numbers. Categories keep their order. Cells that
# hold arrays are stacked.


def is_frame(source: Any) -> bool:
    cls = type(source)
    return cls.__name__ == "DataFrame" and cls.__module__.partition(".")[0] == "pandas"


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
    """Return the values of a column, and fields of its `Column`."""
    code = getattr(series.dtype, "kind", "O")
    if code == "f":
        return series.to_numpy(np.dtype(f"f{series.dtype.itemsize}"), na_value=np.nan), {}
    if (missing := series.isna().to_numpy()).any():
        return _text(series), {"remark": f"no value in row {int(missing.argmax()):,}"}
    if series.dtype.name == "category":
        codes, categories = series.cat.codes.to_numpy().astype(np.int64), series.cat.categories
        return codes, {"classes": tuple(map(str, categories))}
    if code in "iub":
        return series.to_numpy(np.dtype(bool if code == "b" else f"{code}{series.dtype.itemsize}")), {}
    cells = series.tolist()
    if all(isinstance(cell, str) for cell in cells):
        classes, codes = np.unique(np.asarray(cells, object), return_inverse=True)
        if len(classes) <= MOST_CLASSES:
            return codes.astype(np.int64), {"classes": tuple(classes.tolist())}
    elif all(isinstance(cell, np.ndarray | list) for cell in cells):
        return np.stack([to_array(cell, name, "the data frame") for cell in cells]), {}
    return _text(series), {"remark": str(series.dtype)}


def _text(series: Any) -> np.ndarray:
    """Return strings. They cannot be trained on, but messages name the column."""
    return np.asarray(series.astype(str).tolist(), str)


_ALONE = Alone()


class Stream:
    """A stream of batches. The first one is read at once, for the columns.

    All processes read the same batches and each keeps its share. A function that takes `rank` and
    `size`, and a DataLoader with a `DistributedSampler`, return the shard of a process.
    """

    is_divided: bool
    """True if each process gets its own shard. The first process without a batch ends the epoch."""
    _shard: tuple[int | None, int] | None = None
    """Rank, if known, and number of processes of the shard."""

    def __init__(self, source: Iterable[Any] | Callable[..., Iterable[Any]]):
        self._source = source
        parameters = [] if isinstance(source, Iterable) else _parameters(source)
        self._takes_rank = {"rank", "size"} <= {parameter.name for parameter in parameters}
        self._sampler: Any = getattr(source, "sampler", None)
        if (shards := getattr(self._sampler, "num_replicas", None)) is not None:
            self._shard = (getattr(self._sampler, "rank", None), shards)
        self.is_divided = self._takes_rank or self._shard is not None
        self._takes_epoch = any(p.default is p.empty for p in parameters if p.name not in ("rank", "size"))
        self._ready: tuple[int, Batch, Iterator[Batch]] | None = None  # epoch, its first batch, the other batches
        batches = self._start(0, _ALONE)
        first = self._describe(batches)
        self._ready = (0, first, batches)

    def _describe(self, batches: Iterator[Batch]) -> Batch:
        """Set the columns from the first batch, and return it."""
        first = next(batches, None)
        if first is None:
            raise DataError("the stream of batches is empty")
        self.columns = {name: Column(array.dtype, array.shape[1:]) for name, array in first.items()}
        return first

    @property
    def batches_per_epoch(self) -> int | None:
        """Return the number of batches per epoch, if the source has a length."""
        try:
            return len(self._source)  # type: ignore[arg-type] # not every source has one
        except TypeError:
            return None

    def epoch(
        self, epoch: int, start: int = 0, *, size: int = 1, drop: bool = False, group: ProcessGroup = _ALONE
    ) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `start`. Only `SizedStream` uses `size` and `drop`."""
        self._check_part(group)
        ready, self._ready = self._ready, None
        is_same = ready is not None and ready[0] == epoch and (group.size == 1 or not self._takes_rank)
        if ready is not None and is_same:
            batches: Iterator[Batch] = itertools.chain([ready[1]], ready[2])
        elif isinstance(self._source, Iterator):
            hint = "pass a function that makes the generator, or something that can be iterated again"
            raise DataError(f"the stream has ended, but epoch {epoch} needs it again", hint=hint)
        else:
            batches = self._start(epoch, group)
        yield from itertools.islice(batches, start, None)

    def _check_part(self, group: ProcessGroup) -> None:
        if self._shard not in (None, (None, group.size), (group.rank, group.size)):
            rank, shards = self._shard or (0, 1)
            shard = f"one of {shards} shards" if rank is None else f"shard {rank} of {shards}"
            message = f"the data are {shard}, but this is process {group.rank} of {group.size}"
            raise DataError(message, hint="make a shard per process, or pass all data to every process")

    def _start(self, epoch: int, group: ProcessGroup) -> Iterator[Batch]:
        source = self._source
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        if isinstance(source, Iterable):
            items = source
        else:
            shard = {"rank": group.rank, "size": group.size} if self._takes_rank else {}
            items = source(epoch, **shard) if self._takes_epoch else source(**shard)
        if not isinstance(items, Iterable):
            hint = "return a generator or a list of batches"
            raise DataError(f"the function returned an object of type `{type(items).__name__}`, not batches", hint=hint)
        for number, item in enumerate(items):
            yield _batch(item, number)


class SizedStream(Stream):
    """A stream of samples, in batches of the requested size."""

    def __init__(self, shard: tuple[int | None, int] | None):
        self._shard, self.is_divided = shard, shard is not None
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
        """Return batches of `size` samples after the skipped ones; `drop` a smaller last one."""

    def _batches(self, epoch: int, size: int, skipped: int, drop: bool) -> Iterator[Batch]:
        for number, item in enumerate(self._open(epoch, size, skipped, drop), skipped // size):
            yield _batch(item, number)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that a function of batches may have: the epoch, `rank` and `size`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind in kinds or p.name in ("rank", "size")]


def _batch(item: Any, number: int) -> Batch:
    """Return a copy of a batch: batches are prefetched, and a source may reuse its buffers."""
    batch = {name: np.array(to_array(value, name, f"batch {number:,}")) for name, value in arrays_by_name(item).items()}
    lengths = {name: array.shape[0] if array.shape else None for name, array in batch.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        hint = "a batch is a dict or tuple of arrays whose first axis counts samples"
        raise DataError(f"batch {number:,} has no common number of samples: {lengths}", hint=hint)
    return batch


class HubDataset(Dataset):
    """A Hugging Face `datasets.Dataset`, read in batches of arrays."""

    def __init__(self, dataset: Any):
        super().__init__({}, len(dataset), "the dataset")
        self._dataset = dataset.with_format("numpy")
        self._views: dict[tuple[str, ...], Any] = {}  # with a selection of columns: others may be large
        first = _arrays(self._dataset, [0])
        names = _names_of_classes(dataset)
        self.columns = {
            name: Column(a.dtype, a.shape[1:], names.get(name), is_costly=True) for name, a in first.items()
        }

    def _take(self, indices: np.ndarray, names: Sequence[str]) -> Batch:
        if tuple(names) not in self._views:
            self._views[tuple(names)] = self._dataset.with_format("numpy", columns=list(names))
        arrays = _arrays(self._views[tuple(names)], indices.tolist())
        for name, array in arrays.items():
            if array.dtype.hasobject:
                raise DataError(f"rows of column `{name}` differ in shape or are not numbers", hint="pad them")
        return arrays


def _names_of_classes(dataset: Any) -> dict[str, tuple[str, ...]]:
    """Return the class names of each `ClassLabel`."""
    features = (getattr(dataset, "features", None) or {}).items()
    labels = {name: feature for name, feature in features if type(feature).__name__ == "ClassLabel"}
    return {name: tuple(label.names) for name, label in labels.items() if getattr(label, "names", None)}


def _arrays(dataset: Any, indices: list[int]) -> Batch:
    return {name: to_array(values, name, "the dataset") for name, values in dataset[indices].items()}


# ---- streamed datasets -----------------------------------------------------------------------------------------------


class HubStream(SizedStream):
    """A Hugging Face `datasets.IterableDataset`, or its shard from `split_dataset_by_node`."""

    def __init__(self, dataset: Any):
        self._dataset = dataset.with_format("numpy")
        nodes = getattr(dataset, "_distributed", None)
        super().__init__(None if nodes is None else (nodes.rank, nodes.world_size))
        names = _names_of_classes(dataset)
        self.columns = {n: dataclasses.replace(column, classes=names.get(n)) for n, column in self.columns.items()}

    def _open(self, epoch: int, size: int, skipped: int, drop: bool) -> Iterable[Any]:
        rest = self._dataset.skip(skipped) if skipped else self._dataset
        rest.set_epoch(epoch)  # seeds the shuffle
        batches: Iterable[Any] = rest.iter(size, drop_last_batch=drop)
        return batches


def is_ray(source: Any) -> bool:
    return type(source).__module__.startswith("ray.") and hasattr(source, "iter_batches")


class RayStream(SizedStream):
    """A `ray.data.Dataset`, or a shard of one from `get_dataset_shard` or `streaming_split`."""

    def __init__(self, dataset: Any):
        self._dataset = dataset
        if hasattr(dataset, "context"):  # without this, blocks come in the order in which they finish
            dataset.context.execution_options.preserve_order = True
        super().__init__((None, dataset.world_size()) if hasattr(dataset, "world_size") else None)

    def _open(self, epoch: int, size: int, skipped: int, drop: bool) -> Iterable[Any]:
        batches = self._dataset.iter_batches(batch_size=size, batch_format="numpy", drop_last=drop)
        return itertools.islice(batches, skipped // size, None)
