"""What data are: named columns, and rows taken by their numbers. All that can be opened becomes this, or a stream."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from onward.errors import DataError, UnsupportedError, suggest

Batch = dict[str, np.ndarray]

MOST_CLASSES = 10_000
"""Text with more different values is no class but prose."""


@dataclass(frozen=True)
class Column:
    """What one sample has in a column. A dimension that is not known, or varies, is None."""

    dtype: np.dtype
    shape: tuple[int | None, ...] = ()
    classes: tuple[str, ...] | None = None  # the numbers stand for these names
    remark: str = ""  # what a user may wonder about
    limit: float | None = None  # numbers that were bytes go from 0 to this
    is_costly: bool = field(default=False, compare=False)  # each value is decoded from an image, or made by Python code

    def __str__(self) -> str:
        name = "text" if self.dtype.kind in "USO" else self.dtype.name
        dims = ", ".join("?" if dim is None else str(dim) for dim in self.shape)
        remarks = [f"{len(self.classes)} classes"] if self.classes else []
        remarks += [self.remark] if self.remark else []
        return f"{name}[{dims}]" + (f" ({', '.join(remarks)})" if remarks else "")


@runtime_checkable
class Dataset(Protocol):
    """Rows that can be taken in any order, and by several threads: training and validation may share them."""

    @property
    def columns(self) -> Mapping[str, Column]: ...

    def __len__(self) -> int: ...

    def take(self, indices: np.ndarray, columns: Sequence[str] | None = None) -> Batch:
        """These rows in this order: all columns, or only those named, in arrays that the caller may keep."""
        ...

    def row(self, index: int) -> str:
        """Where a row comes from, for messages: `row 17 of digits.npz`."""
        ...


def pieces_of(data: Dataset) -> np.ndarray | None:
    """The first row of each piece of data that are read in pieces, and the number of all rows; None for others.

    To read a row of a piece is to read all of it, so that rows are better taken in an order that knows (`pieces`).
    """
    return getattr(data, "pieces", None)


def bytes_of_row(columns: Mapping[str, Column], names: Iterable[str]) -> int:
    """What a row takes in memory. A dimension that is not known does not count."""
    return sum(columns[name].dtype.itemsize * math.prod(dim or 1 for dim in columns[name].shape) for name in names)


class Rows(Protocol):
    """One column: an array whose first dimension counts rows, wherever it is."""

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, indices: np.ndarray, /) -> Any: ...


def _turned(arrays: Mapping[str, Rows], lengths: Mapping[str, int]) -> tuple[str, int] | None:
    """Return a column that has the rows of most others on a later axis, and that axis."""
    common = max(lengths.values(), key=list(lengths.values()).count)
    odd = (name for name in arrays if lengths[name] != common and common in arrays[name].shape)
    return next(((name, arrays[name].shape.index(common)) for name in odd), None)


class Columns:
    """A data set made of columns that are arrays, in memory or in files."""

    def __init__(self, arrays: Mapping[str, Rows], origin: str = "the data"):
        if not arrays:
            raise DataError(f"{origin} has no columns")
        for name, array in arrays.items():
            _check_column(name, array, origin)
        lengths = {name: array.shape[0] for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"`{name}` has {length:,}" for name, length in lengths.items())
            hint = "give the columns that belong together: image=FILE.npz:x_train label=FILE.npz:y_train"
            if turned := _turned(arrays, lengths):
                hint = f"rows are axis 0: if those of `{turned[0]}` are axis {turned[1]}, move them there in the data"
            raise DataError(f"columns of {origin} differ in their number of rows: {listed}", hint=hint)
        self._arrays = dict(arrays)
        self._origin = origin
        self.columns = {name: Column(a.dtype, tuple(a.shape[1:])) for name, a in arrays.items()}
        self._length = next(iter(lengths.values()))
        check_not_empty(self._length, origin)

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray, columns: Sequence[str] | None = None) -> Batch:
        return {name: self._arrays[name][indices] for name in known_columns(columns, self.columns, self._origin)}

    def row(self, index: int) -> str:
        return f"row {index:,} of {self._origin}"


def _check_column(name: str, array: Rows, origin: str) -> None:
    if array.dtype.hasobject and not _is_text(array):
        hint = "save numbers of one type and shape per column; nothing that needs unpickling is loaded"
        raise DataError(f"column `{name}` of {origin} holds Python objects, not numbers", hint=hint)
    if not array.shape:
        raise DataError(f"column `{name}` of {origin} is a single value; a column has a value per row")


def _is_text(array: Rows) -> bool:
    return isinstance(array, np.ndarray) and array.ndim == 1 and all(isinstance(item, str) for item in array)


def check_not_empty(length: int, origin: str) -> None:
    if not length:
        raise DataError(f"{origin} has no rows", hint="there must be something to learn from")


def known_columns(wanted: Sequence[str] | None, columns: Mapping[str, Column], origin: str) -> Sequence[str]:
    """The names of the columns to take, all of which exist."""
    for name in wanted or ():
        if name not in columns:
            listed = "columns are " + ", ".join(f"`{other}`" for other in columns)
            raise DataError(f"{origin} has no column `{name}`", hint=suggest(name, columns) or listed)
    return list(columns) if wanted is None else wanted


def check_names(names: Iterable[str], origin: str) -> None:
    """Refuse columns without a name, and of the same: which of them is meant, nobody knows."""
    for name, count in Counter(names).items():
        if count > 1 or not name:
            what = f"{count} columns called `{name}`" if name else "a column without a name"
            raise DataError(f"{origin} has {what}", hint="give each a name of its own")


def to_array(value: Any, name: str, origin: str = "the data") -> np.ndarray:
    """A numpy array of whatever is like one: lists, numbers, tensors of a framework."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):  # a tensor of PyTorch, which may be on a device or need gradients
        value = value.detach().cpu()
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:  # lists of different lengths; types that numpy does not have
        raise DataError(f"column `{name}` of {origin} is not an array: {error}") from None


def optional_package(module: str, purpose: str) -> Any:
    """A module of the extra `data`."""
    package = {"PIL": "Pillow"}.get(module.partition(".")[0], module.partition(".")[0])
    try:
        return importlib.import_module(module)
    except ImportError:
        message = f"{purpose} needs {package}, which is not installed"
        raise UnsupportedError(message, hint="pip install 'onward[data]'") from None
