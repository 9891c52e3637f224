"""Streams: batches that come as they are, in their own order: an iterable, a generator function, a torch DataLoader."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from onward.errors import DataError
from onward.training.data.dataset import Batch, Column, to_array
from onward.training.data.samples import parts_by_name


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
