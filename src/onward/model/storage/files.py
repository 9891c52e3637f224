"""File system queries, and a sink that leaves holes and reports progress."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from onward.errors import InvalidModelError, message_of

PathLike = str | os.PathLike[str]
PAGE = 4096


_KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def regular(path: PathLike) -> os.stat_result:
    """Return the status of a regular file; raise OSError for anything else.

    Called before a file is opened: a pipe may block forever, and a device may have no end.
    """
    info = os.stat(path)
    if not stat.S_ISREG(info.st_mode):
        what = _KINDS.get(stat.S_IFMT(info.st_mode), "special file")
        raise NotRegularError(errno.EINVAL, f"a {what}, not a file", os.fspath(path))
    return info


class NotRegularError(OSError):
    """A path that is not a regular file."""


def listing(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; empty if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def mentions(path: PathLike, name: str) -> bool:
    """True if a file contains these bytes."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(name.encode()) >= 0
    except ValueError:  # an empty file cannot be mapped
        return False
    except OSError:
        return True  # unreadable: it may


def flush(file: BinaryIO) -> None:
    """Flush a file to the disk, to survive a power failure."""
    file.flush()
    os.fsync(file.fileno())


def sync(folder: Path, *, strict: bool) -> bool:
    """Flush new names in a folder to the disk, if the system can; False if it failed."""
    if os.name == "nt":
        return True
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):  # the file system cannot flush folders
            return True
        if strict:
            raise
        return False
    return True


def reason(error: Exception) -> str:
    """Return the system's error text without the number."""
    return (isinstance(error, OSError) and error.strerror) or message_of(error) or type(error).__name__


SENSELESS = (AttributeError, LookupError, TypeError, ValueError)
"""Exceptions for a stored tree that is malformed."""


@contextmanager
def blame_file(sentence: str, *kinds: type[Exception], hint: str | None = None) -> Iterator[None]:
    """Convert errors of these types to errors about a file: `sentence` and the reason."""
    blamed = kinds or (OSError, ValueError)
    try:
        yield
    except blamed as error:
        raise InvalidModelError(f"{sentence}: {reason(error)}", hint=hint) from error


def is_plain_name(name: Any) -> bool:
    """True if a name stays in its folder."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", "..")


# ---- writing ---------------------------------------------------------------------------------------------------------


BLOCK = 1 << 24
"""Bytes in memory at a time."""
_UNIT = 1 << 20
"""Bytes that are compared with zeros at a time: holes are found at this grain."""
_ZEROS = bytes(_UNIT)
_NOT_OFFERED = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


class Watcher(Protocol):
    """An observer of file writes."""

    def begin(self, size: int) -> None:
        """Announce the number of bytes to write."""

    def advance(self, size: int) -> None:
        """Report written bytes."""


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def report_writes_to(watcher: Watcher) -> Iterator[None]:
    """Report writes to a watcher within the context."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def announce(size: int) -> None:
    """Announce the number of bytes to write to the watcher."""
    if (watcher := _watcher.get()) is not None:
        watcher.begin(size)


def advance(size: int) -> None:
    """Report written bytes to the watcher."""
    if (watcher := _watcher.get()) is not None:
        watcher.advance(size)


class Sink:
    """A new file that is written from start to end, with holes for zeros where the system can.

    It has no `fileno`: writers would use it to bypass `write`. With `checksums` it computes CRC-32,
    which takes a quarter of a second per GB.
    """

    def __init__(self, file: BinaryIO, *, checksums: bool = False):
        self._file = file
        self._checksum = 0 if checksums else None

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, at: int) -> None:
        """Move forward; the gap reads as zeros."""
        self._file.seek(at)

    def skip(self, size: int) -> None:
        """Write zeros as a hole."""
        self._file.seek(size, os.SEEK_CUR)
        advance(size)
        if self._checksum is not None:
            for start in range(0, size, _UNIT):
                self._add(_ZEROS[: size - start])

    def take_checksum(self) -> int:
        """Return the CRC-32 of the bytes since the last call."""
        checksum, self._checksum = self._checksum, 0
        return checksum or 0

    def _add(self, data: bytes | memoryview) -> None:
        if self._checksum is not None:
            self._checksum = zlib.crc32(data, self._checksum)

    def write(self, data: bytes | memoryview) -> int:
        with memoryview(data).cast("B") as view:
            for start in range(0, len(view), _UNIT):
                unit = view[start : start + _UNIT]
                if _is_zero(unit):
                    self.skip(len(unit))
                else:
                    self._file.write(unit)
                    self._add(unit)
                    advance(len(unit))
            return len(view)

    def copy(self, source: int, start: int, size: int) -> int:
        """Copy bytes of another file by its descriptor within the system; return the number copied.

        Some file systems copy without writing, by sharing blocks.
        """
        self._file.flush()
        at, done = self._file.tell(), 0
        while done < size and hasattr(os, "copy_file_range"):
            most = min(size - done, BLOCK)
            try:
                count = os.copy_file_range(source, self._file.fileno(), most, start + done, at + done)
            except OSError as error:
                if error.errno not in _NOT_OFFERED:
                    raise
                break
            if not count:
                break
            if self._checksum is not None:
                self._add(os.pread(source, count, start + done))
            done += count
            advance(count)
        self._file.seek(at + done)
        return done

    def finish(self) -> None:
        """End the file here, even in a hole."""
        self._file.truncate()


def _is_zero(unit: memoryview) -> bool:
    return not any(unit[:16]) and bytes(unit) == (_ZEROS if len(unit) == _UNIT else _ZEROS[: len(unit)])


def is_repeated(array: np.ndarray) -> bool:
    """True if an array is one repeated number in the memory of one."""
    return bool(array.size) and not any(array.strides)


def write_array(array: np.ndarray, sink: Sink) -> None:
    """Write the bytes of an array in order. A repeated number is written in blocks."""
    if is_repeated(array):
        number = array.flat[0]
        if not any(number.tobytes()):
            sink.skip(array.nbytes)
            return
        most = max(BLOCK // array.itemsize, 1)
        block = np.full(min(array.size, most), number, array.dtype).view(np.uint8).data
        for start in range(0, array.size, most):
            sink.write(block[: min(array.size - start, most) * array.itemsize])
        return
    sink.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def extents(file: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Return the ranges of a file that hold data; the rest are holes, which read as zeros."""
    if not hasattr(os, "SEEK_DATA"):
        yield start, end
        return
    while start < end:
        try:
            start = os.lseek(file, start, os.SEEK_DATA)
            stop = min(os.lseek(file, start, os.SEEK_HOLE), end)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: no data after `start`
                yield start, end
            return
        if start < end:
            yield start, stop
        start = stop
