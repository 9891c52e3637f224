"""Data sets of Hugging Face `datasets` and of Ray Data, which need not be installed: they bring their own methods."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from onward.errors import DataError
from onward.training.data.dataset import Batch, Column, check_not_empty, known_columns, to_array
from onward.training.data.streams import SizedStream


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
