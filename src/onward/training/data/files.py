"""Arrays in files, read row by row.

Files are read, not memory-mapped. If a mapped file shrinks, the process ends at once (SIGBUS), with
a run that could have been saved; a short read is an ordinary error. Mapped pages also count as
memory of the process. A read per row takes a microsecond or two, and the system's cache keeps what
fits.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, ClassVar

import numpy as np

from onward.errors import DataError
from onward.model.storage.containers import Stored
from onward.model.storage.files import NotRegularError, PathLike, reason, regular
from onward.training.data.dataset import Batch, Column, Dataset


def check_file(path: PathLike) -> int:
    """Return the size of a regular file, and raise DataError for anything else."""
    try:
        return regular(path).st_size
    except NotRegularError as error:
        hint = "write the data to a regular file first: it is read more than once"
        raise DataError(f"{path} is {reason(error)}", hint=hint) from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {reason(error)}") from error


def files_in(folder: Path) -> list[Path]:
    """Return the visible entries of a folder, sorted by name."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {reason(error)}") from error


UNCHANGED = "do not change the data during a run; the run can be resumed"
GONE = "the file was deleted after it was opened: restore it, then resume the run"
_MOST_OPEN = 256


class DataFile:
    """A file for random reads, closed when it is no longer referenced.

    At most `_MOST_OPEN` named files are open at a time. The least recently used one is closed, and
    reopened on demand; it must be unchanged then.
    """

    _open: ClassVar[OrderedDict[int, weakref.ref[DataFile]]] = OrderedDict()  # most recently used last
    _open_lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, file: IO[bytes], origin: str, path: Path | None = None):
        self.origin = origin
        self.size = file.seek(0, 2)
        self._path = None if path is None else path.absolute()  # the current folder may change
        self._lock = threading.Lock()  # guards the file position
        self._hold(file)

    @classmethod
    def open(cls, path: Path) -> DataFile:
        check_file(path)
        try:
            return cls(open(path, "rb", buffering=0), str(path), path)
        except OSError as error:
            raise DataError(f"cannot open {path}: {error.strerror or error}") from error

    def _hold(self, file: IO[bytes]) -> None:
        self._file: IO[bytes] | None = file
        self._facts = _facts(file)
        self._close = weakref.finalize(self, _close, id(self), file)
        if self._path is not None:
            with self._open_lock:
                self._open[id(self)] = weakref.ref(self)
                for other in [reference() for reference in list(self._open.values())[:-_MOST_OPEN]]:
                    if other is not None and other._lock.acquire(blocking=False):  # not in use
                        other._close()
                        other._file = None
                        other._lock.release()

    def _file_to_read(self) -> IO[bytes]:
        """Return the file, reopened if necessary. The caller holds the lock."""
        if self._path is None or self._file is not None:
            assert self._file is not None
            with self._open_lock:
                if id(self) in self._open:
                    self._open.move_to_end(id(self))
            return self._file
        if not self._path.exists():
            raise DataError(f"{self._path} is gone", hint=GONE)
        file = open(self._path, "rb", buffering=0)  # noqa: SIM115 # closed like the others
        if _facts(file) != self._facts:
            file.close()
            raise DataError(f"{self._path} has changed since it was opened", hint=UNCHANGED)
        self._hold(file)
        return file

    @classmethod
    def temporary(cls, fill: Callable[[IO[bytes]], None], origin: str) -> DataFile:
        """Return a temporary copy, removed with the process at the latest (unnamed if the system allows)."""
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 # closed like the others
        try:
            fill(file)
        except OSError as error:
            file.close()
            message = f"cannot make a temporary copy of {origin}: {error.strerror or error}"
            raise DataError(message, hint="free disk space, or set TMPDIR to a folder on another disk") from error
        except BaseException:
            file.close()
            raise
        return cls(file, f"the temporary copy of {origin}")

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes from offset `at`, fewer at the end of the file."""
        buffer = np.empty(max(min(count, self.size - at), 0), np.uint8)
        self.read_into(buffer, at)
        return buffer.tobytes()

    def read_into(self, buffer: np.ndarray, at: int) -> None:
        """Fill a flat buffer with the bytes from offset `at`."""
        view = buffer.data
        try:
            with self._lock:
                file = self._file_to_read()
                file.seek(at)
                while view.nbytes:  # reads may be short: Linux returns at most 2 GiB
                    count = file.readinto(view)  # type: ignore[attr-defined] # raw files have it
                    if not count:
                        raise DataError(f"{self.origin} has shrunk since it was opened", hint=UNCHANGED)
                    view = view[count:]
        except OSError as error:
            raise DataError(f"cannot read {self.origin}: {error.strerror or error}") from error


def _facts(file: IO[bytes]) -> tuple[int, int, int]:
    """Return facts that change when a file changes."""
    stat = os.fstat(file.fileno())
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _close(number: int, file: IO[bytes]) -> None:
    with DataFile._open_lock:
        DataFile._open.pop(number, None)
    file.close()


class FileRows:
    """An array in a file, in C order, whose rows are read on demand."""

    def __init__(self, file: DataFile, offset: int, dtype: np.dtype, shape: tuple[int, ...]):
        self.dtype, self.shape = dtype, shape
        self._file, self._offset = file, offset
        self._row_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.shape[0]:
            raise IndexError(f"rows {indices.min()} to {indices.max()} of {self.shape[0]}")
        raw = np.empty(len(indices) * self._row_bytes, np.uint8)
        breaks = np.flatnonzero(np.diff(indices) != 1) + 1  # consecutive rows are one read
        for start, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(indices)], strict=True):
            if start < stop:
                buffer = raw[start * self._row_bytes : stop * self._row_bytes]
                self._file.read_into(buffer, self._offset + int(indices[start]) * self._row_bytes)
        return raw.view(self.dtype).reshape(len(indices), *self.shape[1:])

    def all(self) -> np.ndarray:
        return self[np.arange(self.shape[0])]


def rows_of(file: DataFile, stored: Stored) -> FileRows | np.ndarray:
    """Return an array in a file, loaded if memory allows, else read by rows."""
    needed = stored.offset + stored.size
    if file.size < needed:
        hint = "the file was not written or copied completely; write it again"
        raise DataError(f"{file.origin} is truncated: it has {file.size:,} of {needed:,} bytes", hint=hint)
    if not stored.size:
        return np.empty(stored.shape, stored.dtype)
    rows = FileRows(file, stored.offset, stored.dtype, stored.shape)
    in_memory = hold_in_memory(stored.size, rows.all) if stored.shape else None
    return rows if in_memory is None else in_memory


# ---- small data in memory, with a common limit -----------------------------------------------------------------------


LIMIT = 128 << 20  # bytes

_lock = threading.RLock()  # reentrant: a finalizer may run while it is held
_used = 0


def hold_in_memory(size: int, make: Callable[[], np.ndarray]) -> np.ndarray | None:
    """Return the array of `make`, of `size` bytes, if the limit allows; else None."""
    with _lock:
        if _used + size > LIMIT:
            return None
        _count(size)
    try:
        array = make()
    except BaseException:
        _count(-size)
        raise
    weakref.finalize(array, _count, -size)
    return array


def _count(size: int) -> None:
    global _used
    with _lock:
        _used += size


# ---- converted data --------------------------------------------------------------------------------------------------
# Data without random access to rows (text, compressed files) are converted once, in chunks, to a temporary file of
# records: a row is one read for any number of columns, and memory does not grow with rows. Only columns in use are
# converted. The file is unnamed where the system allows it, so it disappears with the process. It is in `TMPDIR`.


class Records(Dataset):
    """A dataset that is converted when its rows are first taken.

    `chunks` yields named columns from beginning to end, some thousand rows at a time. `row` replaces
    the method.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        length: int,
        origin: str,
        chunks: Callable[[Sequence[str]], Iterator[Batch]],
        row: Callable[[int], str] | None = None,
    ):
        super().__init__(columns, length, origin)
        self._chunks, self._row = chunks, row or super().row
        self._lock = threading.Lock()
        self._tables: list[np.ndarray | FileRows] = []  # of records, with different columns each
        self._texts: Batch = {}  # strings of any length, in memory

    def _take(self, indices: np.ndarray, names: Sequence[str]) -> Batch:
        with self._lock:
            converted = {name for table in self._tables for name in table.dtype.names or ()}
            missing = [name for name in names if name not in converted and name not in self._texts]
            texts = [name for name in missing if self.columns[name].dtype.hasobject]
            if texts:
                chunks = list(self._chunks(texts))
                self._texts |= {name: np.concatenate([chunk[name] for chunk in chunks]) for name in texts}
            if numbers := [name for name in missing if name not in texts]:
                self._tables.append(self._convert(numbers))
        batch: Batch = {name: self._texts[name][indices] for name in names if name in self._texts}
        for table in self._tables:
            used = [name for name in table.dtype.names or () if name in names]
            if used:
                records = table[indices]
                batch |= {name: np.ascontiguousarray(records[name]) for name in used}
        return {name: batch[name] for name in names}

    def row(self, index: int) -> str:
        return self._row(index)

    def _convert(self, names: Sequence[str]) -> np.ndarray | FileRows:
        record = np.dtype([(name, *field_of(self, name)) for name in names])

        def in_memory() -> np.ndarray:
            table, position = np.empty(len(self), record), 0
            for records in self._records(names, record):
                table[position : position + len(records)] = records
                position += len(records)
            return table

        def write(file: IO[bytes]) -> None:
            for records in self._records(names, record):
                records.tofile(file)

        if (table := hold_in_memory(record.itemsize * len(self), in_memory)) is not None:
            return table
        return FileRows(DataFile.temporary(write, self.origin), 0, record, (len(self),))

    def _records(self, names: Sequence[str], record: np.dtype) -> Iterator[np.ndarray]:
        count = 0
        for chunk in self._chunks(names):
            rows = len(chunk[names[0]])
            count += rows
            if count > len(self):
                break
            records = np.empty(rows, record)
            for name in names:
                records[name] = chunk[name]
            yield records
        if count != len(self):
            raise DataError(f"{self.origin} has changed since it was opened: it has another number of rows")


def field_of(data: Dataset, name: str) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the type and shape of a column, which must be the same for all rows."""
    column = data.columns[name]
    if column.dtype.kind == "U" or None in column.shape:
        raise DataError(f"cannot train on column `{name}` of {data.origin}: it is {column}")
    return column.dtype, tuple(dim for dim in column.shape if dim is not None)
