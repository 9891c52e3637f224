"""Files that become valid together or not at all, and the error that explains a failure."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from onward.errors import Error, WriteError
from onward.model.storage.files import PathLike, flush, reason, sync


class Transaction:
    """The new files of one save: the rename of the model file makes all valid."""

    def __init__(self, target: Path):
        self.target = target
        self.temporary = target.with_name(f".{target.name[:60]}.{secrets.token_hex(4)}.tmp")
        self.mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        self.data: list[Path] = []
        self.file: BinaryIO | None = None

    def create(self, path: Path) -> BinaryIO:
        """Return a new file with the permissions of the old model."""
        mode = 0o666 if self.mode is None else self.mode & 0o666
        file = open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115
        if self.mode is not None:
            os.chmod(path, mode)  # `os.open` applies the umask
        return file

    def create_data(self, names: Iterator[Path]) -> tuple[Path, BinaryIO]:
        for path in names:
            self.data.append(path)  # before it is created, so that an interrupt leaves nothing behind
            try:
                return path, self.create(path)
            except FileExistsError:  # another process saves at the same time
                self.data.pop()
        raise AssertionError("there is always another name")

    def commit(self, *payload: bytes) -> None:
        assert self.file is not None
        with self.file as file:
            for chunk in payload:
                file.write(chunk)
            flush(file)
        if self.mode is not None:
            os.chmod(self.temporary, self.mode)
        sync(self.target.parent, strict=True)
        os.replace(self.temporary, self.target)

    def __enter__(self) -> Transaction:
        try:
            self.file = self.create(self.temporary)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if os.path.lexists(self.temporary):  # true until the rename, whenever an interrupt comes
            if self.file is not None:
                with suppress(OSError):  # closing may try to write once more
                    self.file.close()
            for path in (*self.data, self.temporary):
                with suppress(OSError):
                    path.unlink()
        if isinstance(error, Exception) and not isinstance(error, WriteError):
            raise write_error(self.target, error) from error


def write_file(path: PathLike, content: str | bytes) -> None:
    """Write a file as a whole, or raise and leave the old one."""
    with Transaction(target_of(path)) as transaction:
        transaction.commit(content.encode() if isinstance(content, str) else content)


def target_of(path: PathLike) -> Path:
    """Return the file to write, after checks that come before any work."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise WriteError(
            f"could not write `{path}`: the folder `{target.parent}` does not exist", hint=f"mkdir -p {target.parent}"
        )
    if target.exists() and not target.is_file():
        raise WriteError(f"could not write `{path}`: it is not a file", hint="name a file, such as `model.onnx`")
    if target.exists() and not os.access(target, os.W_OK):  # a rename would replace it all the same
        raise WriteError(f"could not write `{path}`: it is read-only", hint="save under another name")
    return target


def is_torn(target: Path, file: Path) -> bool:
    """True if a file was left by a process that was killed while it wrote `target`."""
    pattern = rf"\.{re.escape(target.name[:60])}\.[0-9a-f]{{8}}\.tmp"
    return file.parent == target.parent and bool(re.fullmatch(pattern, file.name))


def write_error(target: Path, error: Exception) -> WriteError:
    number = error.errno if isinstance(error, OSError) else None
    hint = "nothing was changed; remove the cause and save again"
    if isinstance(error, Error):
        hint = error.hint or hint
    elif number in (errno.ENOSPC, errno.EDQUOT):
        hint = f"make room in `{target.parent}`, or save elsewhere"
    elif number == errno.EFBIG:
        hint = "the file system limits the size of files: pass `shard_bytes`, or save elsewhere"
    elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "save into a folder that you may write to"
    culprit = f" (`{error.filename}`)" if isinstance(error, OSError) and error.filename else ""
    return WriteError(f"could not write `{target}`: {reason(error)}{culprit}", hint=hint)


# ---- several files at once -------------------------------------------------------------------------------------------


@contextmanager
def replacing(folder: Path, what: Path | None = None) -> Iterator[Path]:
    """Return a folder to write into; its files replace those of the same names in `folder`.

    A failure before or during the move changes nothing. Other files in `folder` stay. `what` names
    the content in messages (default: the folder).
    """
    target = Path(os.path.realpath(folder))
    if target.exists() and not target.is_dir():
        raise WriteError(f"could not write `{folder}`: it is not a folder", hint="name a folder that does not exist")
    inside = target if target.exists() else target.parent
    staging = inside / f".{target.name[:60]}.{secrets.token_hex(4)}.tmp"
    try:
        inside.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
        # Make all that was written survive a power failure.
        for directory, _, names in os.walk(staging):
            for name in names:
                with open(Path(directory) / name, "r+b") as file:
                    flush(file)
            sync(Path(directory), strict=True)
        _put(staging, target)
    except OSError as error:
        raise (error if isinstance(error, WriteError) else write_error(what or folder, error)) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _put(staging: Path, target: Path) -> None:
    if not target.exists():
        os.replace(staging, target)
        sync(target.parent, strict=False)
        return
    new = sorted(staging.iterdir())
    for entry in new:
        # The new file keeps the permissions of the old one; a file does not replace a folder.
        old = target / entry.name
        if old.exists() and old.is_dir() != entry.is_dir():
            what = "a folder" if old.is_dir() else "a file"
            raise WriteError(f"could not write `{old}`: it is {what}", hint="write under another name")
        if old.is_file() and not os.access(old, os.W_OK):  # a rename would replace it all the same
            raise WriteError(f"could not write `{old}`: it is read-only", hint="write under another name")
        if old.is_file() and entry.is_file() and not old.is_symlink():
            entry.chmod(stat.S_IMODE(old.stat().st_mode))
    backup = staging.with_suffix(".old")
    backup.mkdir()
    try:
        for entry in new:
            if os.path.lexists(target / entry.name):
                os.replace(target / entry.name, backup / entry.name)
            os.replace(entry, target / entry.name)
    except BaseException:  # an interrupt, too
        for entry in new:
            if not os.path.lexists(entry):
                os.replace(target / entry.name, entry)
            if os.path.lexists(backup / entry.name):
                os.replace(backup / entry.name, target / entry.name)
        with suppress(OSError):
            backup.rmdir()
        raise
    sync(target, strict=False)
    shutil.rmtree(backup, ignore_errors=True)
