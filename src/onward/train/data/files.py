"""Arrays in files, read row by row.

Files are read, not mapped. A mapped file that shrinks while it is used ends the process at once (SIGBUS), and with it
a run that could have been saved; a read that comes back short is an error like any other. Pages of a mapped file also
count as memory of the process. A read per row costs a microsecond or two, and the system's cache keeps what fits.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import BinaryIO

import numpy as np

from onward.errors import DataError
from onward.train.data.dataset import HELD


class FileRows:
    """An array in a file, in C order, of which rows are read when asked for."""

    def __init__(self, file: BinaryIO, offset: int, dtype: np.dtype, shape: tuple[int, ...], origin: str):
        self.dtype, self.shape = dtype, shape
        self._file, self._offset, self._origin = file, offset, origin
        self._row_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        self._lock = threading.Lock()  # a file has one position

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.shape[0]:
            raise IndexError(f"rows {indices.min()} to {indices.max()} of {self.shape[0]}")
        out = np.empty((len(indices), *self.shape[1:]), self.dtype)
        raw = out.reshape(-1).view(np.uint8).reshape(len(indices), self._row_bytes)
        breaks = np.flatnonzero(np.diff(indices) != 1) + 1  # neighbours are read at once
        for start, stop in zip([0, *breaks], [*breaks, len(indices)], strict=True):
            if stop > start:
                self._read(raw[start:stop], int(indices[start]))
        return out

    def all(self) -> np.ndarray:
        return self[np.arange(self.shape[0])]

    def _read(self, into: np.ndarray, first: int) -> None:
        view = into.reshape(-1).data
        at = self._offset + first * self._row_bytes
        try:
            with self._lock:
                self._file.seek(at)
                while view.nbytes:  # a system may return less than asked for, and does beyond 2 GiB
                    count = self._file.readinto(view)  # type: ignore[attr-defined] # a raw file has it
                    if not count:
                        raise DataError(
                            f"{self._origin} has become shorter since it was opened: row {first:,} is missing",
                            hint="leave data as they are until the run is over; the run can be resumed",
                        )
                    view = view[count:]
        except OSError as error:
            raise DataError(f"cannot read {self._origin}: {error.strerror or error}") from error


def rows_of(file: BinaryIO, offset: int, dtype: np.dtype, shape: tuple[int, ...], origin: str) -> FileRows | np.ndarray:
    """An array in a file: in memory if it is small, else to be read by rows. It must be there in full."""
    needed = offset + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    there = file.seek(0, 2)
    if there < needed:
        hint = "it was not written or copied to its end; write it again"
        raise DataError(f"{origin} is cut off: it has {there:,} bytes of {needed:,}", hint=hint)
    rows = FileRows(file, offset, dtype, shape, origin)
    return rows.all() if shape and needed - offset <= HELD else rows


def open_binary(path: Path) -> BinaryIO:
    try:
        return open(path, "rb", buffering=0)  # stays open as long as the data are used
    except OSError as error:
        raise DataError(f"cannot open {path}: {error.strerror or error}") from error
