"""The folder of a run while it is trained: begun, saved to, gone on with, and nobody else's meanwhile."""

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
from onward.model.serde import places_of, save
from onward.model.storage import form_of, goes_outside, is_external, verify_checksums, write_file
from onward.model.storage.data import Writers, is_own
from onward.model.storage.files import mentions
from onward.model.storage.tensor_places import is_in
from onward.model.storage.transaction import is_torn
from onward.training.config import write_settings
from onward.training.run import BEST, CONFIG, LAST, LOG, ORIGINAL, TRAINING, Place, Run
from onward.transform.training import strip

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


_MODELS = (TRAINING, BEST, LAST, ORIGINAL)
_EVENTS = "events.out.tfevents.*.onward"


class Folder(Run):
    """The folder of a run while it is trained."""

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        self._made: list[Path] = []
        """The folder and those around it, if they were made here."""
        self._form: storage.External = "auto"
        """Where the model as it was given has its tensors, and so have those that come of it."""
        self.notes: list[str] = []
        """What the user should know about a run that is reopened."""

    def refuse_if_in_use(self) -> None:
        """Fail if this cannot be the folder of a new run."""
        if (self.path / TRAINING).exists():
            raise DataError(
                f"`{self.path}` holds a run already",
                hint=f"go on with it (`onward train --resume {self.path}`), or name another folder",
            )
        others = [path for path in self.path.iterdir() if path.name != LOCK] if self.path.is_dir() else []
        if not (self.path / CONFIG).exists() and not all(is_torn(self.path / CONFIG, path) for path in others):
            raise DataError(f"`{self.path}` holds other files", hint="name a new folder for the run")

    def make(self, *, new: bool = False) -> None:
        """Make the folder, if it is not there; one that must be new is not."""
        try:
            self._made += [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=not new)
        except OSError as error:
            if new and isinstance(error, FileExistsError):
                raise
            raise WriteError(
                f"could not make the folder `{self.path}` of the run: {error.strerror or error}",
                hint="name another one: `run=...` (`--run FOLDER`)",
            ) from error

    @contextlib.contextmanager
    def begin(self, original: Model, training: Model, config: dict[str, Any], at: Place) -> Iterator[None]:
        """The folder of a new run, for a model as it was given. Within it, the folder is ours alone.

        What training does not change is copied into it, and from then on read from there. If the run fails before it
        has made a step (`at` says so), the folder is as it was before.
        """
        self.make()
        with lock_folder(self.path):
            self.refuse_if_in_use()  # again: it may just have been
            before = set(self.path.iterdir())
            self._refuse_links()
            try:
                self._sweep()
                self.configure(config)
                self._form = form_of(places_of(original))
                save(
                    strip(original),
                    self.path / ORIGINAL,
                    also=[*_unchanging_places(training), *_user_places(training)],
                    checksums=True,
                )
                yield
            except BaseException as error:
                can_go_on = (self.path / TRAINING).exists() and not isinstance(error, Exception)
                if not (at.step or can_go_on):
                    self._undo(before)
                raise

    @contextlib.contextmanager
    def reopen(self) -> Iterator[Model]:
        """The training model as it was last saved. Within it, the folder is ours alone."""
        self.refuse_if_empty()
        with lock_folder(self.path):
            self._refuse_links()
            self._sweep()
            self._verify()
            model, original, shared = self.load_training(), load(self.path / ORIGINAL), self._shared_files()
            self._form = form_of(places_of(original))
            if elsewhere := [place for place in _unchanging_places(model) if not is_in(place.tensor, shared)]:
                save(original, self.path / ORIGINAL, also=elsewhere, checksums=True)  # as an older version has left it
            yield model

    def _verify(self) -> None:
        """Refuse files that have changed since they were saved: a flipped bit can make a weight of 2e37."""
        names = [name for name in (TRAINING, ORIGINAL, BEST) if (self.path / name).exists()]
        for name in names:
            try:
                if not verify_checksums(self.path / name) and name == TRAINING:
                    self.notes.append(f"{TRAINING} has no checksum: damage to files of this run cannot be detected")
            except InvalidModelError as error:
                raise DataError(error.message, hint=self._way_around(name)) from error

    def _way_around(self, damaged: str) -> str:
        if damaged == BEST:
            return f"to resume without it, remove it: rm {self.path / BEST}"
        for name in (BEST, LAST):
            with contextlib.suppress(InvalidModelError):
                if (self.path / name).exists() and verify_checksums(self.path / name):
                    config = self.path / CONFIG
                    return f"{name} is intact; to train on from it: onward train {self.path / name} --config {config}"
        return f"restore the folder from a copy, or start again: onward train --config {self.path / CONFIG}"

    # ---- what is written ---------------------------------------------------------------------------------------------

    def configure(self, config: Mapping[str, Any]) -> None:
        write_file(self.path / CONFIG, write_settings(config))

    def save(self, model: Model, at: Place, writers: Writers | None = None) -> None:
        """Keep the training model, and where the run stands, all at once; what several write is beside the file."""
        for step in model.steps:
            step.metadata["train.progress"] = json.dumps(dataclasses.asdict(at))
        form = "data" if writers is not None and self._form == "auto" else self._form
        save(model, self.path / TRAINING, form, shared=self._shared_files(), writers=writers, checksums=True)

    def export(self, model: Model, name: str) -> Path:
        """Write the inference model with the weights that a training model has now."""
        return save(self._inference(model), self.path / name, self._form, shared=self._shared_files(), checksums=True)

    def export_last(self) -> None:
        """Write the inference model with the weights that were saved last."""
        self.export(self.load_training(), LAST)

    def note_lengths(self, at: Place) -> None:
        """Note how long the log and the event file are."""
        at.log = (self.path / LOG).stat().st_size
        at.board = sum(file.stat().st_size for file in self.path.glob(_EVENTS))

    def rewind(self, at: Place) -> None:
        """Take the steps off the log that a run made after it stood there, and lost when it was killed."""
        for file, length in [(self.path / LOG, at.log), *((file, at.board) for file in self.path.glob(_EVENTS))]:
            if file.exists():
                os.truncate(file, min(length, file.stat().st_size))

    def _refuse_links(self) -> None:
        """What is written to, cut off or removed here is in this folder: none of it may be a way to something else."""
        folder = self.path.resolve()
        for file in folder.iterdir():
            ours = file.name in (*_MODELS, CONFIG, LOG) or any(is_own(folder / name, file) for name in _MODELS)
            if (ours or file.match(_EVENTS)) and not stat.S_ISREG(file.lstat().st_mode):
                raise DataError(f"`{self.path / file.name}` is not a file, but a link or something else", hint=_OWN)

    def _sweep(self) -> None:
        """Remove what a process left behind that was killed: half-written files, data that no model refers to."""
        folder = self.path.resolve()
        models, there = [folder / name for name in _MODELS], list(folder.glob("*.onnx"))
        for file in folder.iterdir():
            is_half = any(is_torn(folder / name, file) for name in (*_MODELS, CONFIG))
            own = any(is_own(model, file) for model in models)
            if is_half or (own and not any(mentions(model, file.name) for model in there)):
                file.unlink(missing_ok=True)

    def _undo(self, before: set[Path]) -> None:
        """Remove what was made since then, and the folder if that was, too."""
        for file in set(self.path.iterdir()) - before:
            with contextlib.suppress(OSError):
                file.unlink()
        if self._made:
            remove_lock(self.path)
        for folder in self._made:
            with contextlib.suppress(OSError):  # others may use it by now
                folder.rmdir()

    def _shared_files(self) -> set[Path]:
        """Data files that are written once: those of the model as it was given, and of all that stays as it was."""
        folder = self.path.resolve()
        return {file for file in folder.iterdir() if is_own(folder / ORIGINAL, file)}


class Follower(Folder):
    """The folder of a run for a process that is not the first of those that train together: it writes nothing."""

    @contextlib.contextmanager
    def begin(self, original: Model, training: Model, config: dict[str, Any], at: Place) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def reopen(self) -> Iterator[Model]:
        yield self.load_training()

    def export(self, model: Model, name: str) -> Path:
        return self.path / name

    def _leave(self, *_: Any, **__: Any) -> None:
        """Leave it to the first process."""

    configure = save = export_last = note_lengths = rewind = _leave


_OWN = "a run has all its files in its folder: put the file itself there"


def _unchanging_places(model: Model) -> list[storage.TensorPlace]:
    """The places of what training does not change, if that is to be outside the file."""
    places, changing = places_of(model), _changing_state(model)
    return [place for place in places if place.holder not in changing] if goes_outside(places) else []


def _user_places(model: Model) -> list[storage.TensorPlace]:
    """The places of what training changes that is in files of the user: an engine may begin with it as it is there."""
    changing = _changing_state(model)
    return [place for place in places_of(model) if place.holder in changing and is_external(place.tensor)]


def _changing_state(model: Model) -> set[Any]:
    return {model.initializer(name, index) for index, step in enumerate(model.steps) for name in step.update}
