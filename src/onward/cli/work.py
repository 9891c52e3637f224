"""Doing something with files: show that it goes on, and blame the right one if it fails."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from onward.cli.console import err
from onward.errors import Error, InvalidModelError, safe


@contextmanager
def working(what: str, *files: Path) -> Iterator[None]:
    """Show that something is going on, where somebody looks on.

    Where it fails in a way that nobody expected, on a file that breaks the rules, the file is to blame.
    """
    try:
        with err().status(safe(what)) if err().is_terminal else nullcontext():
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
