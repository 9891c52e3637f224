"""Doing something with files: show that it goes on, and blame the right one if it fails."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from onward.cli.console import err
from onward.errors import Error, InvalidModelError, safe

if TYPE_CHECKING:
    from rich.progress import Progress


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
    from onward.model.storage.stream import report_writes_to

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
    except (Error, OSError, MemoryError):  # these say well enough what happened
        raise
    except Exception as error:
        for file in files:
            if _breaks_rules(file):
                raise _to_blame(file, error) from error
        raise


def _breaks_rules(file: Path) -> bool:
    from onward.checker import check

    with suppress(Exception):  # the first error is the one to tell
        return any(finding.severity == "error" for finding in check(file))
    return False


def _to_blame(file: Path, error: Exception) -> InvalidModelError:
    what = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    return InvalidModelError(
        f"`{file}` is not a valid model: {what}", hint=f"`onward check {file}` says what is wrong with it"
    )
