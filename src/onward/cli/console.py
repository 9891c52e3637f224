"""What is printed, and where: results on stdout, everything else on stderr, plain text that no file can disturb."""

from __future__ import annotations

import functools
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onward.errors import safe

if TYPE_CHECKING:
    from rich.console import Console


class ClosedPipe(Exception):
    """Nobody reads what is printed."""


def out() -> Console:
    """Where results go."""
    return _console(stderr=False)


def err() -> Console:
    """Where errors, progress and remarks go."""
    return _console(stderr=True)


@functools.cache
def _console(stderr: bool) -> Console:
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise ClosedPipe  # rich would end the process here

    return Quiet(stderr=stderr, markup=False, highlight=False, emoji=False)


def say(text: str = "", style: str | None = None) -> None:
    """One line of a result. It is never wrapped: terminals do that, and programs do not want it."""
    out().print(safe(text), style=style, soft_wrap=True)


def remark(text: str) -> None:
    """A line for the person at the terminal, which is no result."""
    err().print(safe(text), soft_wrap=True)


def print_json(value: Any) -> None:
    """A result for programs."""
    try:
        sys.stdout.write(json.dumps(value, indent=2) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise ClosedPipe from None


def print_error(message: str, hint: str | None) -> None:
    """`error:` and `hint:`, further lines aligned."""
    _print_labelled("error:", "bold red", message)
    if hint:
        _print_labelled("hint: ", "bold cyan", hint)


def print_warning(message: str) -> None:
    _print_labelled("warning:", "bold yellow", message)


def _print_labelled(label: str, style: str, message: str) -> None:
    from rich.text import Text

    indented = safe(message).replace("\n", "\n" + " " * (len(label) + 1))
    err().print(Text.assemble((label, style), " ", indented), soft_wrap=True)


def print_rows(rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """Columns without lines around them. The last one is wrapped where a person reads it, and left alone elsewhere."""
    from rich.text import Text

    console = out()
    cells = [[safe(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) + 2 for column in zip(*(row[:-1] for row in cells), strict=True)]
    room = max(console.width - sum(widths), 20) if console.is_terminal else sys.maxsize
    styles = [*styles, *[""] * (len(widths) + 1 - len(styles))]
    for *first, last in cells:
        text = Text.assemble(*((c.ljust(w), style) for c, w, style in zip(first, widths, styles, strict=False)))
        lines = textwrap.wrap(last, room, break_on_hyphens=False) if len(last) > room else [last]
        text.append(("\n" + " " * sum(widths)).join(lines), styles[len(widths)])
        text.rstrip()
        console.print(text, soft_wrap=True)


def print_fields(fields: Sequence[tuple[str, str]], indent: str = "") -> None:
    """A line for each, its label before it."""
    width = max((len(label) for label, _ in fields), default=0) + 2
    for label, text in fields:
        say(f"{indent}{label:<{width}}{text}")


def word(value: Any) -> str:
    """A value as one would type it: `true`, `none`, `0.001`, `[30,60]`."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(word, value))}]"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
