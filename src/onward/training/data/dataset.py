"""Datasets: named columns, with rows taken by number. All data become a dataset or a stream."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from onward.errors import DataError, UnsupportedError, suggest

Batch = dict[str, np.ndarray]

MOST_CLASSES = 10_000
"""Text with more distinct values is prose, not class names."""


@dataclass(frozen=True)
class Column:
    """Type of a column, per sample. An unknown or varying dimension is None."""

    dtype: np.dtype
    shape: tuple[int | None, ...] = ()
    classes: tuple[str, ...] | None = None  # names of the class numbers
    remark: str = ""  # a note for messages
    limit: float | None = None  # maximum of numbers that were bytes
    is_costly: bool = field(default=False, compare=False)  # values come from images or Python code

    def __str__(self) -> str:
        name = "text" if self.dtype.kind in "USO" else self.dtype.name
        dims = ", ".join("?" if dim is None else str(dim) for dim in self.shape)
        remarks = [f"{len(self.classes)} classes"] if self.classes else []
        remarks += [self.remark] if self.remark else []
        return f"{name}[{dims}]" + (f" ({', '.join(remarks)})" if remarks else "")


class Dataset(ABC):
    """Rows that can be taken in any order, also by several threads at once."""

    pieces: np.ndarray | None = None
    """The first row of each piece, and the number of all rows; None for data without pieces.

    Reading a row reads its whole piece, so rows are taken in an order that respects pieces.
    """
    files: Sequence[str] | None = None
    """The file of each row, for data of one file per row."""

    def __init__(self, columns: Mapping[str, Column], length: int, origin: str):
        check_not_empty(length, origin)
        self.columns, self._length, self.origin = columns, length, origin

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray, columns: Sequence[str] | None = None) -> Batch:
        """Return rows in this order: all columns, or the named ones, in new arrays."""
        for name in columns or ():
            self.check_column(name)
        return self._take(indices, list(self.columns) if columns is None else columns)

    @abstractmethod
    def _take(self, indices: np.ndarray, names: Sequence[str]) -> Batch: ...

    def row(self, index: int) -> str:
        """Return the origin of a row, for messages."""
        return f"row {index:,} of {self.origin}"

    def check_column(self, name: str, origin: str | None = None) -> None:
        if name not in self.columns:
            listed = "columns are " + ", ".join(f"`{other}`" for other in self.columns)
            raise DataError(
                f"{origin or self.origin} has no column `{name}`", hint=suggest(name, self.columns) or listed
            )


def bytes_of_row(columns: Mapping[str, Column], names: Iterable[str]) -> int:
    """Return the bytes of a row in memory. Unknown dimensions do not count."""
    return sum(columns[name].dtype.itemsize * math.prod(dim or 1 for dim in columns[name].shape) for name in names)


def gather(starts: np.ndarray, indices: np.ndarray, take: Callable[[int, np.ndarray], Batch]) -> Batch:
    """Return rows of consecutive tables: `take(i, rows)` returns rows of table i, which begins at `starts[i]`."""
    if len(indices) and not 0 <= indices.min() <= indices.max() < starts[-1]:
        raise IndexError(f"rows {indices.min()} to {indices.max()} of {starts[-1]}")
    tables = np.searchsorted(starts, indices, side="right") - 1
    batch: Batch = {}
    for number in np.unique(tables).tolist() or [0]:  # columns and types of no rows are those of the first table
        mask = np.flatnonzero(tables == number)
        for name, values in take(number, indices[mask] - starts[number]).items():
            if name not in batch:
                batch[name] = np.empty((len(indices), *values.shape[1:]), values.dtype)
            batch[name][mask] = values
    return batch


class Rows(Protocol):
    """A column: an array, in memory or in a file, whose first axis counts rows."""

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, indices: np.ndarray, /) -> Any: ...


def _transposed(arrays: Mapping[str, Rows], lengths: Mapping[str, int]) -> tuple[str, int] | None:
    """Return a column whose rows seem to be on a later axis, and that axis."""
    common = max(lengths.values(), key=list(lengths.values()).count)
    odd = (name for name in arrays if lengths[name] != common and common in arrays[name].shape)
    return next(((name, arrays[name].shape.index(common)) for name in odd), None)


class Columns(Dataset):
    """A dataset of columns that are arrays, in memory or in files."""

    def __init__(self, arrays: Mapping[str, Rows], origin: str = "the data"):
        if not arrays:
            raise DataError(f"{origin} has no columns")
        for name, array in arrays.items():
            _check_column(name, array, origin)
        lengths = {name: array.shape[0] for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"`{name}` has {length:,}" for name, length in lengths.items())
            hint = "select columns of equal length: image=FILE.npz:x_train label=FILE.npz:y_train"
            if transposed := _transposed(arrays, lengths):
                hint = f"rows are axis 0, but those of `{transposed[0]}` may be axis {transposed[1]}: transpose it"
            raise DataError(f"columns of {origin} differ in their number of rows: {listed}", hint=hint)
        self._arrays = dict(arrays)
        columns = {name: Column(array.dtype, tuple(array.shape[1:])) for name, array in arrays.items()}
        super().__init__(columns, next(iter(lengths.values())), origin)

    def _take(self, indices: np.ndarray, names: Sequence[str]) -> Batch:
        return {name: self._arrays[name][indices] for name in names}


def _check_column(name: str, array: Rows, origin: str) -> None:
    if array.dtype.hasobject and not _is_text(array):
        hint = "save numbers of one type and shape per column; pickled objects are not loaded"
        raise DataError(f"column `{name}` of {origin} holds Python objects, not numbers", hint=hint)
    if not array.shape:
        raise DataError(f"column `{name}` of {origin} is a single value, not one per row")


def _is_text(array: Rows) -> bool:
    return isinstance(array, np.ndarray) and array.ndim > 0 and all(isinstance(item, str) for item in array.flat)


def check_not_empty(length: int, origin: str) -> None:
    if not length:
        raise DataError(f"{origin} has no rows", hint="pass data with at least one row")


def check_names(names: Iterable[str], origin: str) -> None:
    """Refuse unnamed and duplicate columns."""
    for name, count in Counter(names).items():
        if count > 1 or not name:
            problem = f"{count} columns named `{name}`" if name else "a column without a name"
            raise DataError(f"{origin} has {problem}", hint="use unique names")


def to_array(value: Any, name: str, origin: str = "the data") -> np.ndarray:
    """Return a NumPy array of a list, a number or a tensor of a framework."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):  # a PyTorch tensor
        value = value.detach().cpu()
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:  # ragged lists; types that NumPy lacks
        raise DataError(f"column `{name}` of {origin} is not an array: {error}") from None


def optional_package(module: str, purpose: str) -> Any:
    """Import a module of the extra `data`."""
    package = {"PIL": "Pillow"}.get(module.partition(".")[0], module.partition(".")[0])
    try:
        return importlib.import_module(module)
    except ImportError:
        message = f"{purpose} needs {package}, which is not installed"
        raise UnsupportedError(message, hint="pip install 'onward[data]'") from None
