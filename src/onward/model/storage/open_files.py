"""Data files that are held open: what was read stays what it was, whatever their names come to mean.

A name may be gone, as after a save that no longer needs the file, or lead to another file, as after another export.
"""

from __future__ import annotations

import functools
import mmap
import os
import threading
import weakref
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir

from onward.errors import ExternalDataError
from onward.model.storage.stream import BLOCK, Sink, extents


class DataFile:
    """A file that tensors are in, open as long as one of them lives."""

    def __init__(self, path: Path, file: BinaryIO, info: os.stat_result):
        self.path, self.file, self._info = path, file, info
        self._turn = threading.Lock()
        weakref.finalize(self, file.close)

    def mapped(self) -> mmap.mmap:
        """All of it, to look into."""
        self.check()
        return self._mapped

    @functools.cached_property
    def _mapped(self) -> mmap.mmap:
        return mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)

    def let_go(self) -> None:
        """Give back the memory of what was looked at; it is read again when it is used again."""
        if "_mapped" in self.__dict__ and hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def is_named(self) -> bool:
        """Whether its name still leads to it."""
        info = self.check()
        try:
            return os.path.samestat(info, os.stat(self.path))
        except OSError:
            return False

    def check(self) -> os.stat_result:
        """Refuse a file that was written to: nobody has what it held."""
        info = os.fstat(self.file.fileno())
        if (info.st_size, info.st_mtime_ns) != (self._info.st_size, self._info.st_mtime_ns):
            raise ExternalDataError(
                f"`{self.path}` has changed since the model was read: its numbers are no longer the model's",
                hint="read the model again",
            )
        return info

    def copy(self, start: int, size: int, target: BinaryIO | Sink) -> None:
        """Write some of its bytes to another file. They are read, not mapped: a file that shrinks is an error here."""
        end = start + size
        while start < end and (block := self._read(start, min(end - start, BLOCK))):
            target.write(block)
            start += len(block)
        self.check()

    def pour(self, start: int, size: int, sink: Sink) -> None:
        """The same into a new file, with its holes, and by the system where that copies files by itself."""
        end = start + size
        for begin, stop in extents(self.file.fileno(), start, min(end, self.check().st_size)):
            sink.skip(begin - start)
            start = begin + sink.copy(self.file.fileno(), begin, stop - begin)
            if start < stop:
                self.copy(start, stop - start, sink)
                start = stop
        sink.skip(min(end, self.check().st_size) - start)

    def _read(self, start: int, size: int) -> bytes:
        if hasattr(os, "pread"):  # which leaves the position alone, that a forked process has in common
            return os.pread(self.file.fileno(), size, start)
        with self._turn:
            self.file.seek(start)
            return self.file.read(size)


_open: weakref.WeakValueDictionary[tuple[int, ...], DataFile] = weakref.WeakValueDictionary()


def hold_open(path: Path) -> DataFile | None:
    """A data file, held open once however many models use it; None where the system has no room for more of them."""
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 (open as long as it is used)
    except FileNotFoundError:
        raise ExternalDataError(f"`{path}`, which the model's tensors are in, is gone", hint="read it again") from None
    except OSError:  # too many are open, or it may not be read: whoever wants its numbers will be told
        return None
    info = os.fstat(file.fileno())
    key = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
    known = _open.get(key)
    if known is not None and known.path == path:
        file.close()
        return known
    _open[key] = made = DataFile(path, file, info)
    return made


def let_go() -> None:
    """Give back the memory of all files that were looked at."""
    for file in list(_open.values()):
        file.let_go()


class HeldTensor(ir.ExternalTensor):
    """A tensor in a file that is held open."""

    __slots__ = ("source",)

    def __init__(
        self, source: DataFile, location: Any, offset: int | None, length: int | None, dtype: Any, **rest: Any
    ):
        super().__init__(location, offset, length, dtype, **rest)
        self.source = source

    def numpy(self) -> np.ndarray:
        if not self.nbytes:
            return np.empty(self.shape.numpy(), self.dtype.numpy())
        start, shape = self.offset or 0, self.shape.numpy()
        if self.dtype.bitwidth < 8:
            packed = np.frombuffer(self.source.mapped(), np.uint8, self.nbytes, start)
            return ir.PackedTensor(packed, self.dtype, shape=ir.Shape(shape)).numpy()
        plain = self.dtype.numpy().newbyteorder("<")
        return np.frombuffer(self.source.mapped(), plain, self.size, start).reshape(shape)

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return self.numpy().__array__(dtype)

    def tobytes(self) -> bytes:
        start = self.offset or 0
        return self.source.mapped()[start : start + self.nbytes] if self.nbytes else b""

    def tofile(self, file: Any) -> None:
        self.source.copy(self.offset or 0, self.nbytes, file)
