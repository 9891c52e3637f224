"""Arrays in files, read row by row.

Files are read, not mapped. A mapped file that shrinks while it is used ends the process at once (SIGBUS), and with it
a run that could have been saved; a read that comes back short is an error like any other. Pages of a mapped file also
count as memory of the process. A read per row costs a microsecond or two, and the system's cache keeps what fits.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

import numpy as np

from onward.errors import DataError
from onward.model.storage.containers import Stored
from onward.model.storage.files import NotRegularError, PathLike, reason, regular
from onward.training.data.dataset import Batch, Column, check_not_empty, known_columns


def check_file(path: PathLike) -> int:
    """The size of a file that is there to be read; what is none is refused."""
    try:
        return regular(path).st_size
    except NotRegularError as error:
        hint = "write the data to a file first: it is read more than once"
        raise DataError(f"{path} is {reason(error)}", hint=hint) from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {reason(error)}") from error


def files_in(folder: Path) -> list[Path]:
    """What is in a folder, in order, but for what is hidden."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {reason(error)}") from error


UNCHANGED = "leave data as they are until the run is over; the run can be resumed"
GONE = "it was there when the data were opened: put it back; the run can be resumed"
_MOST_OPEN = 256


class DataFile:
    """A file to read from at any place; closed when nobody uses it any more.

    Of files that have a name, no more than some are open at a time: the one that was used least recently is closed,
    and opened when it is needed again. It must be the same then.
    """

    _open: ClassVar[OrderedDict[int, weakref.ref[DataFile]]] = OrderedDict()  # the one that was used last is last
    _open_lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, file: IO[bytes], origin: str, path: Path | None = None):
        self.origin = origin
        self.size = file.seek(0, 2)
        self._path = None if path is None else path.absolute()  # the current folder may be another by then
        self._lock = threading.Lock()  # a file has one position
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
                for other in [one() for one in list(self._open.values())[:-_MOST_OPEN]]:
                    if other is not None and other._lock.acquire(blocking=False):  # else it is in use
                        other._close()
                        other._file = None
                        other._lock.release()

    def _file_to_read(self) -> IO[bytes]:
        """The file, opened again if need be. The caller has the lock."""
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
        """A copy of something, without a name where the system allows that, gone with the process or before."""
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 # closed like the others
        try:
            fill(file)
        except OSError as error:
            file.close()
            message = f"cannot make a temporary copy of {origin}: {error.strerror or error}"
            raise DataError(message, hint="it takes space on the disk; TMPDIR says on which one") from error
        except BaseException:
            file.close()
            raise
        return cls(file, f"the temporary copy of {origin}")

    def read(self, at: int, count: int) -> bytes:
        """Some bytes, fewer where the file ends."""
        buffer = np.empty(max(min(count, self.size - at), 0), np.uint8)
        self.read_into(buffer, at)
        return buffer.tobytes()

    def read_into(self, buffer: np.ndarray, at: int) -> None:
        """Fill a flat buffer of bytes."""
        view = buffer.data
        try:
            with self._lock:
                file = self._file_to_read()
                file.seek(at)
                while view.nbytes:  # a system may return less than asked for, and does beyond 2 GiB
                    count = file.readinto(view)  # type: ignore[attr-defined] # raw files have it
                    if not count:
                        raise DataError(f"{self.origin} has become shorter since it was opened", hint=UNCHANGED)
                    view = view[count:]
        except OSError as error:
            raise DataError(f"cannot read {self.origin}: {error.strerror or error}") from error


def _facts(file: IO[bytes]) -> tuple[int, int, int]:
    """What is the same as long as a file is."""
    stat = os.fstat(file.fileno())
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _close(number: int, file: IO[bytes]) -> None:
    with DataFile._open_lock:
        DataFile._open.pop(number, None)
    file.close()


class FileRows:
    """An array in a file, in C order, of which rows are read when asked for."""

    def __init__(self, file: DataFile, offset: int, dtype: np.dtype, shape: tuple[int, ...]):
        self.dtype, self.shape = dtype, shape
        self._file, self._offset = file, offset
        self._row_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.shape[0]:
            raise IndexError(f"rows {indices.min()} to {indices.max()} of {self.shape[0]}")
        raw = np.empty(len(indices) * self._row_bytes, np.uint8)
        breaks = np.flatnonzero(np.diff(indices) != 1) + 1  # neighbours are read at once
        for start, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(indices)], strict=True):
            if start < stop:
                part = raw[start * self._row_bytes : stop * self._row_bytes]
                self._file.read_into(part, self._offset + int(indices[start]) * self._row_bytes)
        return raw.view(self.dtype).reshape(len(indices), *self.shape[1:])

    def all(self) -> np.ndarray:
        return self[np.arange(self.shape[0])]


def rows_of(file: DataFile, stored: Stored) -> FileRows | np.ndarray:
    """An array in a file: in memory if there is room, else to be read by rows. It must be there in full."""
    needed = stored.offset + stored.size
    if file.size < needed:
        hint = "it was not written or copied to its end; write it again"
        raise DataError(f"{file.origin} is cut off: it has {file.size:,} bytes of {needed:,}", hint=hint)
    if not stored.size:
        return np.empty(stored.shape, stored.dtype)
    rows = FileRows(file, stored.offset, stored.dtype, stored.shape)
    in_memory = hold_in_memory(stored.size, rows.all) if stored.shape else None
    return rows if in_memory is None else in_memory


# ---- small data, which are held in memory; all share one limit -------------------------------------------------------


LIMIT = 128 << 20  # bytes

_lock = threading.RLock()  # arrays may be collected, and counted, while it is held
_used = 0


def hold_in_memory(size: int, make: Callable[[], np.ndarray]) -> np.ndarray | None:
    """What `make` returns, an array of `size` bytes, if there is room for it."""
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


# ---- what is converted -----------------------------------------------------------------------------------------------
# Data whose rows cannot be read one by one (text, compressed files) are converted once, a chunk at a time. The values
# of a row lie together in a temporary file, so that a row is one read whatever the number of columns, and memory stays
# the same whatever the number of rows. Only columns that are used are converted. The file has no name where the system
# allows that, so nothing is left behind, whatever ends the process. `TMPDIR` says where it is.


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
