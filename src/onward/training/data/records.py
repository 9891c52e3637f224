"""Data whose rows cannot be read one by one (text, compressed files) are converted once, a chunk at a time.

The values of a row lie together in a temporary file, so that a row is one read whatever the number of columns, and
memory stays the same whatever the number of rows. Only columns that are used are converted. The file has no name where
the system allows that, so nothing is left behind, whatever ends the process. `TMPDIR` says where it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np

from onward.errors import DataError
from onward.training.data.dataset import Batch, Column, check_not_empty, known_columns
from onward.training.data.files import DataFile, FileRows, hold_in_memory


@dataclass
class Conversion:
    """How to read a source from its beginning to its end."""

    columns: Mapping[str, Column]
    length: int
    chunks: Callable[[Sequence[str]], Iterator[Batch]]  # the named columns, some thousand rows at a time
    row: Callable[[int], str]
    origin: str


class Records:
    """A data set that is converted when its rows are first taken."""

    def __init__(self, source: Conversion):
        check_not_empty(source.length, source.origin)
        self.columns = source.columns
        self._source = source
        self._lock = threading.Lock()
        self._tables: list[np.ndarray | FileRows] = []  # of rows that are records; each has columns of its own
        self._texts: Batch = {}  # which have no length in common, and stay in memory

    def __len__(self) -> int:
        return self._source.length

    def take(self, indices: np.ndarray, columns: Sequence[str] | None = None) -> Batch:
        wanted = known_columns(columns, self.columns, self._source.origin)
        with self._lock:
            converted = {name for table in self._tables for name in table.dtype.names or ()}
            missing = [name for name in wanted if name not in converted and name not in self._texts]
            texts = [name for name in missing if self.columns[name].dtype.hasobject]
            if texts:
                chunks = list(self._source.chunks(texts))
                self._texts |= {name: np.concatenate([chunk[name] for chunk in chunks]) for name in texts}
            if numbers := [name for name in missing if name not in texts]:
                self._tables.append(self._convert(numbers))
        batch: Batch = {name: self._texts[name][indices] for name in wanted if name in self._texts}
        for table in self._tables:
            used = [name for name in table.dtype.names or () if name in wanted]
            if used:
                records = table[indices]
                batch |= {name: np.ascontiguousarray(records[name]) for name in used}
        return {name: batch[name] for name in wanted}

    def row(self, index: int) -> str:
        return self._source.row(index)

    def _convert(self, names: Sequence[str]) -> np.ndarray | FileRows:
        record = np.dtype([(name, *field_of(self.columns, name, self._source.origin)) for name in names])
        size = record.itemsize * self._source.length
        in_memory = hold_in_memory(size, lambda: self._to_memory(names, record))
        return self._to_file(names, record) if in_memory is None else in_memory

    def _to_memory(self, names: Sequence[str], record: np.dtype) -> np.ndarray:
        table = np.empty(self._source.length, record)
        at = 0
        for part in self._records(names, record):
            table[at : at + len(part)] = part
            at += len(part)
        return table

    def _to_file(self, names: Sequence[str], record: np.dtype) -> FileRows:
        def fill(file: IO[bytes]) -> None:
            for part in self._records(names, record):
                part.tofile(file)

        copy = DataFile.temporary(fill, self._source.origin)
        return FileRows(copy, 0, record, (self._source.length,))

    def _records(self, names: Sequence[str], record: np.dtype) -> Iterator[np.ndarray]:
        count = 0
        for chunk in self._source.chunks(names):
            rows = len(chunk[names[0]])
            count += rows
            if count > self._source.length:
                break
            part = np.empty(rows, record)
            for name in names:
                part[name] = chunk[name]
            yield part
        if count != self._source.length:
            raise DataError(f"{self._source.origin} has changed since it was opened: its number of rows is another")


def field_of(columns: Mapping[str, Column], name: str, origin: str) -> tuple[np.dtype, tuple[int, ...]]:
    """The type and shape of what each row has in a column, which must be the same for all."""
    column = columns[name]
    if column.dtype.kind == "U" or None in column.shape:
        raise DataError(f"column `{name}` of {origin} is {column}, which cannot be trained on")
    return column.dtype, tuple(dim for dim in column.shape if dim is not None)
