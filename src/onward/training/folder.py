"""The folder of a run during training: created, locked, saved to, and resumed from."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import platform
import stat
import sys
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from onward.errors import DataError, InvalidModelError, WriteError
from onward.model import Model, load, storage
from onward.model.serde import save, tensor_sites
from onward.model.storage import form_of, goes_outside, is_external, verify_checksums, write_file
from onward.model.storage.data import Writers, is_own
from onward.model.storage.files import mentions
from onward.model.storage.tensor_sites import is_in
from onward.model.storage.transaction import is_torn
from onward.training.config import write_settings
from onward.training.run import BEST, CONFIG, LAST, LOG, ORIGINAL, TRAINING, Position, Run
from onward.transform.training import strip

LOCK = ".lock"
_BYTE = 1 << 20
"""The byte that is locked. On Windows a locked byte cannot be read, and the holder's name is at the
start of the file.
"""
_BUSY = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)

_locked: set[Path] = set()
"""Folders locked by this process: the lock of the system does not distinguish threads."""


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes and other threads."""
    folder = folder.resolve()
    if folder in _locked:  # do not open the file: closing any handle of it releases the lock
        raise _refusal(folder, "this process")
    _locked.add(folder)
    try:
        with _open_locked(folder) as file:
            with contextlib.suppress(OSError):  # on a full disk the lock still holds
                file.truncate(0)
                file.write(f"process {os.getpid()} on {platform.node()}".encode())
            yield
    finally:
        _locked.discard(folder)


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
        file.close()  # the previous holder has removed this file; another process may lock a new one


def remove_lock(folder: Path) -> None:
    """Remove the lock file of a folder that is no longer needed, while it is locked."""
    with contextlib.suppress(OSError):  # Windows does not remove an open file
        (folder / LOCK).unlink()


def _open_file(path: Path) -> FileIO:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise WriteError(f"could not write to `{path.parent}`: `{path.name}` is not a file", hint=f"rm -r {path}")
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        raise WriteError(f"could not write to `{path.parent}`: {error.strerror or error}") from error
    return open(handle, "r+b", buffering=0)


def _refusal(folder: Path, holder: str) -> DataError:
    return DataError(f"{holder} is training in `{folder}`", hint="wait for it, stop it, or use another folder")


def _lock(file: FileIO) -> bool:
    """Return True if the lock is acquired, or if the file system does not support locks."""
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


_MODELS = (TRAINING, BEST, LAST, ORIGINAL)
_EVENTS = "events.out.tfevents.*.onward"


class Folder(Run):
    """The folder of a run during training."""

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        self._created: list[Path] = []
        """Folders that were created here: this one and its parents."""
        self._form: storage.External = "auto"
        """Storage of tensors in the original model, which its successors share."""
        self.notes: list[str] = []
        """Notes for the user about a reopened run."""

    def refuse_if_in_use(self) -> None:
        """Raise DataError if the folder cannot be that of a new run."""
        if (self.path / TRAINING).exists():
            raise DataError(
                f"`{self.path}` already holds a run",
                hint=f"resume it (`onward train --resume {self.path}`), or use another folder",
            )
        others = [path for path in self.path.iterdir() if path.name != LOCK] if self.path.is_dir() else []
        if not (self.path / CONFIG).exists() and not all(is_torn(self.path / CONFIG, path) for path in others):
            raise DataError(f"`{self.path}` holds other files", hint="use a new folder for the run")

    def make(self, *, new: bool = False) -> None:
        """Create the folder if it is missing. With `new`, an existing folder is an error."""
        try:
            self._created += [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=not new)
        except OSError as error:
            if new and isinstance(error, FileExistsError):
                raise
            raise WriteError(
                f"could not create the run folder `{self.path}`: {error.strerror or error}",
                hint="use another folder: `run=...` (`--run FOLDER`)",
            ) from error

    @contextlib.contextmanager
    def begin(self, original: Model, training: Model, config: dict[str, Any], position: Position) -> Iterator[None]:
        """Create and lock the folder of a new run.

        Tensors that training does not change are copied into it once. If the run fails before its
        first step (`position.step` is 0), the folder is restored to its previous state.
        """
        self.make()
        with lock_folder(self.path):
            self.refuse_if_in_use()  # again: another process may have been faster
            before = set(self.path.iterdir())
            self._refuse_links()
            try:
                self._sweep()
                self.configure(config)
                self._form = form_of(tensor_sites(original))
                save(
                    strip(original),
                    self.path / ORIGINAL,
                    also=[*_unchanging_sites(training), *_user_sites(training)],
                    checksums=True,
                )
                yield
            except BaseException as error:
                is_resumable = (self.path / TRAINING).exists() and not isinstance(error, Exception)
                if not (position.step or is_resumable):
                    self._undo(before)
                raise

    @contextlib.contextmanager
    def reopen(self) -> Iterator[Model]:
        """Lock the folder and return the training model of the last save."""
        self.refuse_if_empty()
        with lock_folder(self.path):
            self._refuse_links()
            self._sweep()
            self._verify()
            model, original, shared = self.load_training(), load(self.path / ORIGINAL), self._shared_files()
            self._form = form_of(tensor_sites(original))
            if elsewhere := [site for site in _unchanging_sites(model) if not is_in(site.tensor, shared)]:
                save(original, self.path / ORIGINAL, also=elsewhere, checksums=True)  # of an older version
            yield model

    def _verify(self) -> None:
        """Refuse files that have changed since their save: a flipped bit can make a weight of 2e37."""
        names = [name for name in (TRAINING, ORIGINAL, BEST) if (self.path / name).exists()]
        for name in names:
            try:
                if not verify_checksums(self.path / name) and name == TRAINING:
                    self.notes.append(f"{TRAINING} has no checksum: damage to files of this run cannot be detected")
            except InvalidModelError as error:
                raise DataError(error.message, hint=self._repair_hint(name)) from error

    def _repair_hint(self, damaged: str) -> str:
        if damaged == BEST:
            return f"to resume without it, remove it: rm {self.path / BEST}"
        for name in (BEST, LAST):
            with contextlib.suppress(InvalidModelError):
                if (self.path / name).exists() and verify_checksums(self.path / name):
                    config = self.path / CONFIG
                    return f"{name} is intact; to continue from it: onward train {self.path / name} --config {config}"
        return f"restore the folder from a copy, or start again: onward train --config {self.path / CONFIG}"

    # ---- writing -----------------------------------------------------------------------------------------------------

    def configure(self, config: Mapping[str, Any]) -> None:
        write_file(self.path / CONFIG, write_settings(config))

    def save(self, model: Model, position: Position, writers: Writers | None = None) -> None:
        """Write the training model and the position in one transaction; `writers` write the data file."""
        for step in model.steps:
            step.metadata["train.progress"] = json.dumps(dataclasses.asdict(position))
        form = "data" if writers is not None and self._form == "auto" else self._form
        save(model, self.path / TRAINING, form, shared=self._shared_files(), writers=writers, checksums=True)

    def export(self, model: Model, name: str, results: Mapping[str, float]) -> Path:
        """Write the inference model with the current weights of a training model, and its validation results."""
        inference = self._inference(model, results)
        return save(inference, self.path / name, self._form, shared=self._shared_files(), checksums=True)

    def export_last(self) -> None:
        """Write the inference model with the weights of the last save."""
        self.export(self.load_training(), LAST, self._last_results())

    def note_lengths(self, position: Position) -> None:
        """Record the lengths of the log and the event file in the position."""
        position.log = (self.path / LOG).stat().st_size
        position.board = sum(file.stat().st_size for file in self.path.glob(_EVENTS))

    def rewind(self, position: Position) -> None:
        """Truncate the log to the last save: a killed run has lost the steps after it."""
        boards = [(file, position.board) for file in self.path.glob(_EVENTS)]
        for file, length in [(self.path / LOG, position.log), *boards]:
            if file.exists():
                os.truncate(file, min(length, file.stat().st_size))

    def _refuse_links(self) -> None:
        """Refuse links: files that are written, truncated or removed here must be in this folder."""
        folder = self.path.resolve()
        for file in folder.iterdir():
            is_ours = file.name in (*_MODELS, CONFIG, LOG) or any(is_own(folder / name, file) for name in _MODELS)
            if (is_ours or file.match(_EVENTS)) and not stat.S_ISREG(file.lstat().st_mode):
                raise DataError(f"`{self.path / file.name}` is a link or not a file", hint=_OWN)

    def _sweep(self) -> None:
        """Remove half-written files of a killed process, and data that no model refers to."""
        folder = self.path.resolve()
        models, existing = [folder / name for name in _MODELS], list(folder.glob("*.onnx"))
        for file in folder.iterdir():
            is_half = any(is_torn(folder / name, file) for name in (*_MODELS, CONFIG))
            is_data = any(is_own(model, file) for model in models)
            if is_half or (is_data and not any(mentions(model, file.name) for model in existing)):
                file.unlink(missing_ok=True)

    def _undo(self, before: set[Path]) -> None:
        """Remove the files that were created since, and the folder if it was created."""
        for file in set(self.path.iterdir()) - before:
            with contextlib.suppress(OSError):
                file.unlink()
        if self._created:
            remove_lock(self.path)
        for folder in self._created:
            with contextlib.suppress(OSError):  # another process may use it by now
                folder.rmdir()

    def _shared_files(self) -> set[Path]:
        """Return the data files that are written once: the original model's, and unchanged tensors'."""
        folder = self.path.resolve()
        return {file for file in folder.iterdir() if is_own(folder / ORIGINAL, file)}


class Follower(Folder):
    """The folder of a run in a process other than the first, which writes nothing."""

    @contextlib.contextmanager
    def begin(self, original: Model, training: Model, config: dict[str, Any], position: Position) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def reopen(self) -> Iterator[Model]:
        yield self.load_training()

    def export(self, model: Model, name: str, results: Mapping[str, float]) -> Path:
        return self.path / name

    def _leave(self, *_: Any, **__: Any) -> None:
        """Leave it to the first process."""

    configure = save = export_last = note_lengths = rewind = _leave


_OWN = "put the file itself into the folder of the run"


def _unchanging_sites(model: Model) -> list[storage.TensorSite]:
    """Return the tensors that training does not change, if any are stored outside the model file."""
    sites, changing = tensor_sites(model), _changing_state(model)
    return [site for site in sites if site.holder not in changing] if goes_outside(sites) else []


def _user_sites(model: Model) -> list[storage.TensorSite]:
    """Return the trainable tensors in files of the user, which an engine may read at the start."""
    changing = _changing_state(model)
    return [site for site in tensor_sites(model) if site.holder in changing and is_external(site.tensor)]


def _changing_state(model: Model) -> set[Any]:
    return {model.initializer(name, index) for index, step in enumerate(model.steps) for name in step.update}
