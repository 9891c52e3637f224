"""Several files that become valid together: written beside those that are there, and put in their place at the end."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onward.errors import WriteError
from onward.model.storage.files import flush, sync
from onward.model.storage.transaction import write_error


@contextmanager
def replacing(folder: Path, what: Path | None = None) -> Iterator[Path]:
    """A folder to write into. What is in it at the end is moved to `folder`, over what has the same names there.

    Nothing is changed if anything fails before that, or while it is moved. Other files in `folder` stay as they are.
    `what` is written, for messages; the folder itself unless given.
    """
    target = Path(os.path.realpath(folder))
    if target.exists() and not target.is_dir():
        raise WriteError(f"could not write `{folder}`: it is not a folder", hint="name a folder that is not there yet")
    inside = target if target.exists() else target.parent
    staging = inside / f".{target.name[:60]}.{secrets.token_hex(4)}.tmp"
    try:
        inside.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
        _sync_all(staging)
        _put(staging, target)
    except OSError as error:
        raise (error if isinstance(error, WriteError) else write_error(what or folder, error)) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sync_all(folder: Path) -> None:
    """Make all that was written survive a power failure."""
    for place, _, names in os.walk(folder):
        for name in names:
            with open(Path(place) / name, "r+b") as file:
                flush(file)
        sync(Path(place), strict=True)


def _put(staging: Path, target: Path) -> None:
    if not target.exists():
        os.replace(staging, target)
        sync(target.parent, strict=False)
        return
    new = sorted(staging.iterdir())
    for entry in new:
        _prepare(target / entry.name, entry)
    kept = staging.with_suffix(".old")
    kept.mkdir()
    try:
        for entry in new:
            if os.path.lexists(target / entry.name):
                os.replace(target / entry.name, kept / entry.name)
            os.replace(entry, target / entry.name)
    except BaseException:  # an interrupt, too
        for entry in new:
            if not os.path.lexists(entry):
                os.replace(target / entry.name, entry)
            if os.path.lexists(kept / entry.name):
                os.replace(kept / entry.name, target / entry.name)
        with suppress(OSError):
            kept.rmdir()
        raise
    sync(target, strict=False)
    shutil.rmtree(kept, ignore_errors=True)


def _prepare(old: Path, new: Path) -> None:
    """Let nobody read, or write, the new file who may not do so with the old one; and files are no folders."""
    if old.exists() and old.is_dir() != new.is_dir():
        what = "a folder" if old.is_dir() else "a file"
        raise WriteError(f"could not write `{old}`: it is {what}", hint="write under another name")
    if old.is_file() and not os.access(old, os.W_OK):  # a rename would replace it all the same
        raise WriteError(f"could not write `{old}`: it is read-only", hint="write under another name")
    if old.is_file() and new.is_file() and not old.is_symlink():
        new.chmod(stat.S_IMODE(old.stat().st_mode))
