"""Samples one by one, in a list or an object that has them by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
