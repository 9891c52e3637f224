"""What the file system is asked to do for reading and for writing alike."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

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
    """What the system says of a file; an OSError if there is none, or if it is something else.

    All that is opened for reading is asked for here first: a pipe may keep one waiting for ever, and a device may have
    no end.
    """
    info = os.stat(path)
    if not stat.S_ISREG(info.st_mode):
        what = _KINDS.get(stat.S_IFMT(info.st_mode), "special file")
        raise NotRegularError(errno.EINVAL, f"a {what}, not a file", os.fspath(path))
    return info


class NotRegularError(OSError):
    """A path that names something other than a file."""


def listing(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def mentions(path: PathLike, name: str) -> bool:
    """Whether a file has these bytes in it somewhere."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(name.encode()) >= 0
    except ValueError:  # an empty file cannot be mapped
        return False
    except OSError:
        return True  # it may


def flush(file: BinaryIO) -> None:
    """Make what was written to a file survive a power failure."""
    file.flush()
    os.fsync(file.fileno())


def sync(folder: Path, *, strict: bool) -> bool:
    """Make new names in a folder survive a power failure, where the system offers that; False if it failed to."""
    if os.name == "nt":
        return True
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):  # not offered here
            if strict:
                raise
            return False
    return True


def reason(error: Exception) -> str:
    """What went wrong, in the system's words and without its numbers."""
    return (isinstance(error, OSError) and error.strerror) or message_of(error) or type(error).__name__


SENSELESS = (AttributeError, LookupError, TypeError, ValueError)
"""What is raised where a tree that somebody stored is not as it should be."""


@contextmanager
def blame_file(sentence: str, *kinds: type[Exception], hint: str | None = None) -> Iterator[None]:
    """Within it, errors of these kinds are the fault of a file; `sentence` says so, and the reason ends it."""
    blamed = kinds or (OSError, ValueError)
    try:
        yield
    except blamed as error:
        raise InvalidModelError(f"{sentence}: {reason(error)}", hint=hint) from error


def is_plain_name(name: Any) -> bool:
    """Whether a name is of something in a folder, and does not lead out of it."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", "..")
