"""One process at a time in a folder.

The lock is one of the system's on a file: it ends with the process, however that ends, and children that are forked do
not inherit it. The file stays when nobody holds the lock; who removes it holds it, and who gets it looks whether it is
still there, so that two never hold locks on two files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from onward.errors import DataError, WriteError

LOCK = ".lock"
_BYTE = 1 << 20
"""The byte that is locked. Windows lets nobody read what is locked, and who holds the lock is at the beginning."""
_BUSY = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)

_held: set[Path] = set()
"""Folders that this process has locked: the system knows processes, and not their threads."""


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Within it, no other process, and no other thread, gets a lock on this folder."""
    folder = folder.resolve()
    if folder in _held:  # not even opened: closing any handle of the file would end the lock
        raise _refusal(folder, "this process")
    _held.add(folder)
    try:
        with _open_locked(folder) as file:
            with contextlib.suppress(OSError):  # a lock holds on a full disk, too
                file.truncate(0)
                file.write(f"process {os.getpid()} on {platform.node()}".encode())
            yield
    finally:
        _held.discard(folder)


def _open_locked(folder: Path) -> FileIO:
    while True:
        file = _open_file(folder / LOCK)
        if not _lock(file):
            with file:
                file.seek(0)
                holder = "".join(c for c in file.read(200).decode(errors="replace") if c.isprintable())
                raise _refusal(folder, holder or "another process")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / LOCK)):
                return file
        file.close()  # whoever held it before has removed it, and somebody else may lock a new one


def remove_lock(folder: Path) -> None:
    """Remove the lock, within it, with a folder that is not needed any more."""
    with contextlib.suppress(OSError):  # Windows removes no file that is open
        (folder / LOCK).unlink()


def _open_file(path: Path) -> FileIO:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise WriteError(f"could not write to `{path.parent}`: `{path.name}` in it is not a file", hint="remove it")
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        raise WriteError(f"could not write to `{path.parent}`: {error.strerror or error}") from error
    return open(handle, "r+b", buffering=0)


def _refusal(folder: Path, holder: str) -> DataError:
    return DataError(f"{holder} is training in `{folder}`", hint="wait until it has ended, or stop it")


def _lock(file: FileIO) -> bool:
    """Whether the lock is ours now; also on a file system that has none, where nothing can be done."""
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(_BYTE)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _BYTE)
    except OSError as error:
        return error.errno not in _BUSY
    return True
