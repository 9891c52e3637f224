"""Parquet data, in one file or many. Rows come in row groups, each read as a whole.

Small data are converted once, so that rows can be taken in any order. Large data are read by row
group, in an order that takes the rows of a few groups at a time; a process reads only the groups
that its shard needs. Groups and open files are cached up to a limit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onward.errors import DataError
from onward.training.data.arrow import Reader, pyarrow
from onward.training.data.dataset import (
    Batch,
    Dataset,
    bytes_of_row,
    check_names,
    check_not_empty,
    gather,
    optional_package,
)
from onward.training.data.files import GONE, UNCHANGED, Records, check_file, field_of
from onward.training.data.images import ImageFormat

CONVERTED = 1 << 30
"""Uncompressed bytes up to which data are converted; larger data are read by row group."""
KEPT = 1 << 30
"""Bytes of cached row groups, unless a window or a batch needs more."""
_MOST_OPEN = 16  # files
_CHUNK = 4096  # rows


def open_parquet(paths: Sequence[Path], images: ImageFormat, window: int | None = None) -> Dataset:
    """Open files as one dataset, read by row group with a `window`, converted with window 0."""
    groups, size = _survey(paths)
    origin = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
    check_not_empty(len(groups), str(paths[0]) if len(paths) == 1 else origin)
    first = next(_batches(_open(groups[0].path), groups[0], None, rows=1), None)
    if first is None:
        raise DataError(f"{groups[0].path} is not a complete Parquet file: its rows are missing")
    data = RowGroups(groups, Reader(first, images, groups[0].path.name), origin, window or 0)
    is_small = size <= CONVERTED if window is None else not window
    return data.converted() if is_small else data


class _Group(NamedTuple):
    """A row group."""

    path: Path
    written: tuple[int, int]
    """Size and modification time of the file. The file must keep them."""
    number: int
    """Index in its file."""
    start: int
    """Number of its first row in the file."""
    rows: int


def _survey(paths: Sequence[Path]) -> tuple[list[_Group], int]:
    """Return the row groups of all files, and their bytes. Only the file footers are read."""
    groups: list[_Group] = []
    size, schema = 0, None
    for path in paths:
        with _open(path) as file:
            row_groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
            if schema is None:
                schema = file.schema_arrow
                check_names(schema.names, path.name)
            _check_alike(schema, file.schema_arrow, paths[0], path)
        start, written = 0, _written(path)
        for number, group in enumerate(row_groups):
            if group.num_rows:
                groups.append(_Group(path.absolute(), written, number, start, group.num_rows))
            start += group.num_rows
            size += group.total_byte_size
    return groups, size


def _check_alike(first: Any, other: Any, path: Path, other_path: Path) -> None:
    for name in dict.fromkeys([*first.names, *other.names]):
        mine, theirs = (schema.field(name).type if name in schema.names else None for schema in (first, other))
        if mine is None or theirs is None or not mine.equals(theirs):
            types = f"`{name}` is {mine} in {path.name} and {theirs} in {other_path.name}"
            raise DataError(f"files have different columns: {types}", hint="pass files with the same columns and types")


class RowGroups(Dataset):
    """Rows of files that are read by row group."""

    pieces: np.ndarray

    def __init__(self, groups: Sequence[_Group], reader: Reader, origin: str, window: int):
        self.pieces = np.cumsum([0, *(group.rows for group in groups)])
        super().__init__(reader.columns, int(self.pieces[-1]), origin)
        self._groups, self._reader, self._window = groups, reader, window
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[int, str], np.ndarray] = OrderedDict()  # most recently used last
        self._files: OrderedDict[Path, Any] = OrderedDict()

    def _take(self, indices: np.ndarray, names: Sequence[str]) -> Batch:
        for name in names:
            field_of(self, name)  # refuses columns that cannot be trained on
        used = 0

        def rows_of(number: int, rows: np.ndarray) -> Batch:
            nonlocal used
            group = self._group(number, names)
            used += sum(values.nbytes for values in group.values())
            return {name: values[rows] for name, values in group.items()}

        with self._lock:
            batch = gather(self.pieces, indices, rows_of)
            self._forget(max(KEPT, used + self._window * bytes_of_row(self.columns, names)))
        return batch

    def row(self, index: int) -> str:
        group_index = int(np.searchsorted(self.pieces, index, side="right")) - 1
        group = self._groups[group_index]
        return f"row {group.start + index - int(self.pieces[group_index]):,} of {group.path.name}"

    def converted(self) -> Records:
        """Return converted data, whose rows can be taken in any order."""

        def chunks(names: Sequence[str]) -> Iterator[Batch]:
            for group in self._groups:
                yield from self._read(group, names)
            while self._files:
                self._files.popitem()[1].close()

        return Records(self.columns, len(self), self.origin, chunks, self.row)

    def _group(self, index: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        missing = [name for name in names if (index, name) not in self._cache]
        if missing:
            group = self._groups[index]
            chunks = list(self._read(group, missing))
            for name in missing:
                values = np.concatenate([chunk.pop(name) for chunk in chunks])
                if len(values) != group.rows:
                    raise DataError(f"{group.path} has changed since it was opened: it has another number of rows")
                self._cache[index, name] = values
        for name in names:
            self._cache.move_to_end((index, name))
        return {name: self._cache[index, name] for name in names}

    def _forget(self, limit: int) -> None:
        size = sum(values.nbytes for values in self._cache.values())
        while size > limit:
            size -= self._cache.popitem(last=False)[1].nbytes

    def _read(self, group: _Group, names: Sequence[str]) -> Iterator[Batch]:
        if group.path not in self._files:
            if len(self._files) == _MOST_OPEN:
                self._files.popitem(last=False)[1].close()
            self._files[group.path] = _open_again(group)
        self._files.move_to_end(group.path)
        row, reader = group.start, self._reader.of(group.path.name)
        for batch in _batches(self._files[group.path], group, names):
            yield reader.batch(names, batch, row)
            row += batch.num_rows


def _batches(file: Any, group: _Group, names: Sequence[str] | None, rows: int = _CHUNK) -> Iterator[Any]:
    try:
        for batch in file.iter_batches(rows, row_groups=[group.number], columns=names, use_threads=False):
            if batch.num_rows:
                yield batch
    except (OSError, pyarrow().ArrowException) as error:
        raise DataError(f"cannot read {group.path}: {error}") from None


def _open(path: Path) -> Any:
    parquet = optional_package("pyarrow.parquet", "reading Parquet files")
    check_file(path)
    try:
        return parquet.ParquetFile(path, memory_map=False, pre_buffer=False)
    except (OSError, pyarrow().ArrowException) as error:
        raise DataError(f"{path} is not a complete Parquet file: {error}") from None


def _open_again(group: _Group) -> Any:
    """Open the file of a group again, and raise DataError if it has changed."""
    if not group.path.exists():
        raise DataError(f"{group.path} is gone", hint=GONE)
    if _written(group.path) != group.written:
        raise DataError(f"{group.path} has changed since it was opened", hint=UNCHANGED)
    return _open(group.path)


def _written(path: Path) -> tuple[int, int]:
    return path.stat().st_size, path.stat().st_mtime_ns
