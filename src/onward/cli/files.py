"""What commands do with files: show that it goes on, blame the right one if it fails, never write over one unasked."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from onward.cli.app import Misuse
from onward.cli.console import err, remark
from onward.errors import Error, InvalidModelError, WriteError, safe

if TYPE_CHECKING:
    from rich.progress import Progress

    from onward import Model

Where = Literal["auto", "overlay", "none", "data", "safetensors"]
"""Where tensors go, as `Model.save` has it."""

_OTHERS = {".pt", ".pth", ".keras", ".h5", ".hdf5", ".safetensors", ".npz", ".tflite"}
"""Endings that say that a file is something else."""


# ---- writing a model -------------------------------------------------------------------------------------------------


@dataclass
class Target:
    """Where a result goes, settled before the work that makes it."""

    source: Path
    path: Path
    data: Where = "auto"
    _before: frozenset[str] = frozenset()
    """What was in the folder when it was written."""

    def save(self, model: Model) -> None:
        from onward.model.storage.files import listing

        self._before = frozenset(entry.name for entry in listing(self.path.parent))
        with writing(f"writing {self.path}", self.source):
            model.save(self.path, data=self.data)

    def write(self, model: Model, note: str = "") -> None:
        """Save, and say so."""
        self.save(model)
        remark(f"wrote {self.describe()}{f': {note}' if note else ''}")

    def describe(self, *others: Path) -> str:
        """The file and new ones beside it that hold its tensors, how large they are; and where other tensors stay.

        `others` were written, too.
        """
        from onward.model.storage import data_files_of

        folder = self.path.parent
        data = [folder / file.relative_to(os.path.realpath(folder)) for file in data_files_of(self.path)]
        new = [file for file in data if file.parent == folder and file.name not in self._before]
        stay = [str(file) for file in data if file not in new]
        written = " and ".join([*(f"{file} ({_size(file)})" for file in [self.path, *new]), *map(str, others)])
        return written + (f"; tensors in {' and '.join(stay)} stay there" if stay else "")


def _size(file: Path) -> str:
    """As large as a file is; and what it takes on the disk, where zeros in it take no room."""
    from onward.inspect.formatting import size

    info = file.stat()
    room = getattr(info, "st_blocks", info.st_size) * 512
    return size(info.st_size) + (f", {size(room)} on disk" if room < info.st_size // 2 else "")


def target(source: Path, output: Path | None, ending: str, *, data: Where = "auto", force: bool = False) -> Target:
    """The file to write: `output`, a file in it if it is a folder, or `model-ending.onnx` beside `model.onnx`."""
    name = f"{source.name.removesuffix('.onnx')}-{ending}.onnx"
    path = source.parent / name if output is None else output / name if output.is_dir() else output
    if path.suffix in _OTHERS:
        hint = f"write to `{path.with_suffix('.onnx')}`; `onward convert` writes files of frameworks"
        raise Misuse(f"`{path}` is no name for an ONNX model, which is what is written", hint)
    if not force:
        refuse_to_overwrite(path, source)
    if not path.parent.is_dir():
        raise WriteError(f"there is no folder `{path.parent}` to write `{path.name}` to", hint="create it first")
    if not os.access(path.parent, os.W_OK):
        raise WriteError(f"the folder `{path.parent}` cannot be written to", hint="write elsewhere with `-o`")
    return Target(source, path, data)


def refuse_to_overwrite(path: Path, source: Path | None = None) -> None:
    """Fail if there is a file already; `source` is the model that a command reads."""
    if path.exists():
        is_source = source is not None and source.exists() and path.samefile(source)
        what = f"`{path}` is the model itself" if is_source else f"`{path}` exists"
        raise WriteError(what, hint="write elsewhere with `-o`, or overwrite it with `--force`")


# ---- meanwhile -------------------------------------------------------------------------------------------------------


@contextmanager
def working(what: str, *files: Path) -> Iterator[None]:
    """Show that something is going on, where somebody looks on.

    Where it fails in a way that nobody expected, on a file that breaks the rules, the file is to blame.
    """
    with _blaming(files), err().status(safe(what)) if err().is_terminal else nullcontext():
        yield


@contextmanager
def writing(what: str, *files: Path) -> Iterator[None]:
    """The same while data are written: show how many bytes are, and how fast it goes."""
    from onward.model.storage.files import report_writes_to

    with _blaming(files), _bar(what) as bar, report_writes_to(bar) if bar is not None else nullcontext():
        yield


class _Bar:
    """Tells a person how far writing is."""

    def __init__(self, progress: Progress, what: str):
        self._progress, self._task, self._total = progress, progress.add_task(safe(what), total=None), 0

    def begin(self, size: int) -> None:
        self._total += size
        self._progress.update(self._task, total=self._total)

    def advance(self, size: int) -> None:
        self._progress.advance(self._task, size)


@contextmanager
def _bar(what: str) -> Iterator[_Bar | None]:
    if not err().is_terminal:
        yield None
        return
    from rich import progress as parts

    columns = (
        parts.SpinnerColumn(),
        parts.TextColumn("{task.description}", markup=False),
        parts.BarColumn(),
        parts.DownloadColumn(binary_units=True),
        parts.TransferSpeedColumn(),
        parts.TimeRemainingColumn(),
    )
    with parts.Progress(*columns, console=err(), transient=True) as progress:
        yield _Bar(progress, what)


@contextmanager
def _blaming(files: Iterable[Path]) -> Iterator[None]:
    try:
        yield
    except (Error, Misuse, OSError, MemoryError):  # these say well enough what happened
        raise
    except Exception as error:
        for file in files:
            if _breaks_rules(file):
                what = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
                hint = f"`onward check {file}` says what is wrong with it"
                raise InvalidModelError(f"`{file}` is not a valid model: {what}", hint=hint) from error
        raise


def _breaks_rules(file: Path) -> bool:
    from onward.checker import check

    with suppress(Exception):  # the first error is the one to tell
        return any(finding.severity == "error" for finding in check(file))
    return False
