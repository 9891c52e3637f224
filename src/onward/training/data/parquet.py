"""Parquet, in one file or many. Rows come in groups, of which each is read as a whole.

Small data are converted once, so that rows can be taken in any order. Large ones, which a machine may have no room for,
are read group by group, in an order that takes the rows of a few groups at a time; a process reads the groups that its
part of the batches needs. Groups and open files are kept as long as there is room.
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
    known_columns,
    optional_package,
)
from onward.training.data.files import GONE, UNCHANGED, Conversion, Records, check_file, field_of
from onward.training.data.images import ImageFormat

CONVERTED = 1 << 30
"""Bytes, not compressed, of data that are converted; larger ones are read by groups."""
KEPT = 1 << 30
"""Bytes of groups that are kept in memory, unless a window, or a batch, needs more."""
_MOST_OPEN = 16  # files
_CHUNK = 4096  # rows


def open_parquet(paths: Sequence[Path], images: ImageFormat, window: int | None = None) -> Dataset:
    """Files one after the other. With a `window` they are read by groups, and with 0 they never are."""
    groups, size = _survey(paths)
    origin = paths[0].name if len(paths) == 1 else f"{len(paths)} files"
    check_not_empty(len(groups), str(paths[0]) if len(paths) == 1 else origin)
    first = next(_batches(_open(groups[0].path), groups[0], None, rows=1), None)
    if first is None:
        raise DataError(f"{groups[0].path} is not a whole Parquet file: it has no rows, and says that it has some")
    data = RowGroups(groups, Reader(first, images, groups[0].path.name), origin, window or 0)
    is_small = size <= CONVERTED if window is None else not window
    return data.converted() if is_small else data


class _Group(NamedTuple):
    """Rows that are read together."""

    path: Path
    written: tuple[int, int]
    """The size of the file, and when it was written: as long as these are the same, it is."""
    number: int
    """In its file."""
    start: int
    """The number of its first row in the file."""
    rows: int


def _survey(paths: Sequence[Path]) -> tuple[list[_Group], int]:
    """The groups of all files, and the bytes that they take. Only the ends of files are read, where that is said."""
    groups: list[_Group] = []
    size, schema = 0, None
    for path in paths:
        with _open(path) as file:
            found = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
            if schema is None:
                schema = file.schema_arrow
                check_names(schema.names, path.name)
            _check_alike(schema, file.schema_arrow, paths[0], path)
        start, written = 0, _written(path)
        for number, group in enumerate(found):
            if group.num_rows:
                groups.append(_Group(path.absolute(), written, number, start, group.num_rows))
            start += group.num_rows
            size += group.total_byte_size
    return groups, size


def _check_alike(first: Any, other: Any, path: Path, at: Path) -> None:
    for name in dict.fromkeys([*first.names, *other.names]):
        mine, theirs = (schema.field(name).type if name in schema.names else None for schema in (first, other))
        if mine is None or theirs is None or not mine.equals(theirs):
            message = f"files do not go together: column `{name}` is {mine} in {path.name} and {theirs} in {at.name}"
            raise DataError(message, hint="name files that have the same columns, of the same types")


class RowGroups:
    """Rows of files that are read by groups."""

    def __init__(self, groups: Sequence[_Group], reader: Reader, origin: str, window: int):
        self.columns = reader.columns
        self.pieces = np.concatenate([[0], np.cumsum([group.rows for group in groups])])
        self._groups, self._reader, self._origin, self._window = groups, reader, origin, window
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, str], np.ndarray] = OrderedDict()  # the one that was used last is last
        self._files: OrderedDict[Path, Any] = OrderedDict()

    def __len__(self) -> int:
        return int(self.pieces[-1])

    def take(self, indices: np.ndarray, columns: Sequence[str] | None = None) -> Batch:
        names = known_columns(columns, self.columns, self._origin)
        fields = {name: field_of(self.columns, name, self._origin) for name in names}
        out = {name: np.empty((len(indices), *shape), dtype) for name, (dtype, shape) in fields.items()}
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"rows {indices.min()} to {indices.max()} of {len(self)}")
        places = np.searchsorted(self.pieces, indices, side="right") - 1
        used = 0
        with self._lock:
            for place in np.unique(places).tolist():
                here = np.flatnonzero(places == place)
                for name, values in self._group(place, names).items():
                    out[name][here] = values[indices[here] - self.pieces[place]]
                    used += values.nbytes
            self._forget(max(KEPT, used + self._window * bytes_of_row(self.columns, names)))
        return out

    def row(self, index: int) -> str:
        place = int(np.searchsorted(self.pieces, index, side="right")) - 1
        group = self._groups[place]
        return f"row {group.start + index - int(self.pieces[place]):,} of {group.path.name}"

    def converted(self) -> Records:
        """The same, of which rows can be taken in any order."""

        def chunks(names: Sequence[str]) -> Iterator[Batch]:
            for group in self._groups:
                yield from self._read(group, names)
            while self._files:
                self._files.popitem()[1].close()

        return Records(Conversion(self.columns, len(self), chunks, self.row, self._origin))

    def _group(self, place: int, names: Sequence[str]) -> dict[str, np.ndarray]:
        missing = [name for name in names if (place, name) not in self._kept]
        if missing:
            group = self._groups[place]
            parts = list(self._read(group, missing))
            for name in missing:
                values = np.concatenate([part.pop(name) for part in parts])
                if len(values) != group.rows:
                    raise DataError(f"{group.path} has changed since it was opened: its number of rows is another")
                self._kept[place, name] = values
        for name in names:
            self._kept.move_to_end((place, name))
        return {name: self._kept[place, name] for name in names}

    def _forget(self, limit: int) -> None:
        size = sum(values.nbytes for values in self._kept.values())
        while size > limit:
            size -= self._kept.popitem(last=False)[1].nbytes

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
        raise DataError(f"{path} is not a whole Parquet file: {error}") from None


def _open_again(group: _Group) -> Any:
    """The file of a group, which must be what it was."""
    if not group.path.exists():
        raise DataError(f"{group.path} is gone", hint=GONE)
    if _written(group.path) != group.written:
        raise DataError(f"{group.path} has changed since it was opened", hint=UNCHANGED)
    return _open(group.path)


def _written(path: Path) -> tuple[int, int]:
    return path.stat().st_size, path.stat().st_mtime_ns
