"""Streams: batches without random access, in their own order."""

from __future__ import annotations

import inspect
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from onward.engines.distributed import Alone, ProcessGroup
from onward.errors import DataError
from onward.training.data.dataset import Batch, Column, to_array
from onward.training.data.samples import parts_by_name

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
