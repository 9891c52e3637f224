"""Files of commands: progress display, blame for failures, and refusal to overwrite."""

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
"""Destination of tensors: the `data` argument of `Model.save`."""

_OTHERS = {".pt", ".pth", ".keras", ".h5", ".hdf5", ".safetensors", ".npz", ".tflite"}
"""Suffixes of files that are not ONNX models."""


# ---- writing a model -------------------------------------------------------------------------------------------------


@dataclass
class OutputFile:
    """An output file, checked before the work begins."""

    source: Path
    path: Path
    data: Where = "auto"
    _before: frozenset[str] = frozenset()
    """Names in the folder before it was written."""

    def save(self, model: Model) -> None:
        from onward.model.storage.files import listing

        self._before = frozenset(entry.name for entry in listing(self.path.parent))
        with writing(f"writing {self.path}", self.source):
            model.save(self.path, data=self.data)

    def write(self, model: Model, note: str = "") -> None:
        """Save, and print `wrote ...`."""
        self.save(model)
        remark(f"wrote {self.describe()}{f': {note}' if note else ''}")

    def describe(self, *others: Path) -> str:
        """Return the file and the new data files beside it, with sizes, and the files that keep
        tensors.

        `others` are further files that were written.
        """
        from onward.model.storage import data_files_of

        folder = self.path.parent
        data = [folder / file.relative_to(os.path.realpath(folder)) for file in data_files_of(self.path)]
        new = [file for file in data if file.parent == folder and file.name not in self._before]
        stay = [str(file) for file in data if file not in new]
        written = " and ".join([*(f"{file} ({_size(file)})" for file in [self.path, *new]), *map(str, others)])
        return written + (f"; it reads tensors from {' and '.join(stay)}: keep unchanged" if stay else "")


def _size(file: Path) -> str:
    """Return the size of a file, and its size on disk if it is sparse."""
    from onward.inspect.formatting import size

    info = file.stat()
    room = getattr(info, "st_blocks", info.st_size) * 512
    return size(info.st_size) + (f", {size(room)} on disk" if room < info.st_size // 2 else "")


def target(source: Path, output: Path | None, ending: str, *, data: Where = "auto", force: bool = False) -> OutputFile:
    """Return the output file: `output`, a file in it, or `model-ending.onnx` beside the source."""
    name = f"{source.name.removesuffix('.onnx')}-{ending}.onnx"
    path = beside(source, name) if output is None else output / name if output.is_dir() else output
    if path.suffix in _OTHERS:
        hint = f"write to `{path.with_suffix('.onnx')}`; `onward convert` writes files of frameworks"
        raise Misuse(f"cannot write an ONNX model to `{path}`: its suffix is `{path.suffix}`", hint)
    if not force:
        refuse_to_overwrite(path, source)
    if not path.parent.is_dir():
        raise WriteError(f"cannot write `{path}`: no folder `{path.parent}`", hint=f"mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise WriteError(f"cannot write to the folder `{path.parent}`", hint="write elsewhere: `-o FILE`")
    return OutputFile(source, path, data)


def beside(source: Path, name: str) -> Path:
    """Return the path of a new file beside a source; for a copy of a remote file, in the current folder."""
    from onward.model.storage.remote import is_copy

    return Path(name) if is_copy(source) else source.with_name(name)


def refuse_to_overwrite(path: Path, source: Path | None = None) -> None:
    """Raise an error if a file exists. `source` is the model that the command reads."""
    if path.exists():
        is_source = source is not None and source.exists() and path.samefile(source)
        problem = f"`{path}` is the input model" if is_source else f"`{path}` already exists"
        raise WriteError(problem, hint="write elsewhere with `-o`, or overwrite it with `--force`")


# ---- progress --------------------------------------------------------------------------------------------------------


@contextmanager
def working(text: str, *files: Path) -> Iterator[None]:
    """Show a status line on a terminal.

    An unexpected failure on a file that breaks the rules is blamed on that file.
    """
    with _blaming(files), err().status(safe(text)) if err().is_terminal else nullcontext():
        yield


@contextmanager
def writing(text: str, *files: Path) -> Iterator[None]:
    """Show a progress bar in bytes while data are written. Blame files as `working` does."""
    from onward.model.storage.files import report_writes_to

    with _blaming(files), _bar(text) as bar, report_writes_to(bar) if bar is not None else nullcontext():
        yield


class _Bar:
    """Progress of writing, for a terminal."""

    def __init__(self, progress: Progress, text: str):
        self._progress, self._task, self._total = progress, progress.add_task(safe(text), total=None), 0

    def begin(self, size: int) -> None:
        self._total += size
        self._progress.update(self._task, total=self._total)

    def advance(self, size: int) -> None:
        self._progress.advance(self._task, size)


@contextmanager
def _bar(text: str) -> Iterator[_Bar | None]:
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
        yield _Bar(progress, text)


@contextmanager
def _blaming(files: Iterable[Path]) -> Iterator[None]:
    try:
        yield
    except (Error, Misuse, OSError, MemoryError):  # their messages are clear enough
        raise
    except Exception as error:
        for file in files:
            if _breaks_rules(file):
                problem = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
                hint = f"to list its problems: onward check {file}"
                raise InvalidModelError(f"`{file}` is not a valid model: {problem}", hint=hint) from error
        raise


def _breaks_rules(file: Path) -> bool:
    from onward.checker import check

    with suppress(Exception):  # the first error matters more
        return any(finding.severity == "error" for finding in check(file))
    return False
