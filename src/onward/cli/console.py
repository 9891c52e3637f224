"""Printing: results to stdout, everything else to stderr, as plain text; and the layout of help."""

from __future__ import annotations

import functools
import inspect
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer

from onward.errors import safe

if TYPE_CHECKING:
    from rich.console import Console


USAGE = "[OPTIONS]"
_WIDEST, _COLUMN = 100, 26


def help_text(command: Any, context: Any) -> str:
    """Return the help of a command or of the whole application."""
    return "\n".join(line.rstrip() for line in _lines(command, context))


def _lines(command: Any, context: Any) -> Iterator[str]:
    summary, *paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    parameters = [parameter for parameter in command.get_params(context) if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    commands = getattr(command, "commands", {})
    yield from _wrap(summary)
    yield from ("", f"{_styled('Usage:', bold=True)} {context.command_path} {usage_of(command, parameters)}")
    more = getattr(command, "more", None)
    for paragraph in [*paragraphs, *([more()] if more else [])]:
        yield from ("", *_wrap(paragraph))
    yield from _section("Arguments", [(argument.metavar, argument.help) for argument in arguments])
    for heading, group in _by_panel(commands.values(), "Commands").items():
        yield from _section(heading, [(c.name, inspect.cleandoc(c.help).split("\n\n")[0]) for c in group])
    for heading, group in sorted(_by_panel(options, "Options").items(), key=lambda item: item[0] == "Options"):
        yield from _section(heading, [(_flags(option), option.help) for option in group])
    if command.epilog:
        yield from ("", *command.epilog.splitlines())


def usage_of(command: Any, parameters: list[Any]) -> str:
    """Return the usage line: required arguments and `[OPTIONS]`."""
    if command.options_metavar != USAGE:
        return str(command.options_metavar)
    required = [
        p.metavar if p.param_type_name == "argument" else f"{p.opts[0]} {p.metavar}" for p in parameters if p.required
    ]
    return " ".join([*(["COMMAND"] if hasattr(command, "commands") else required), USAGE])


def _flags(option: Any) -> str:
    names = sorted(option.opts, key=len)
    if option.secondary_opts:  # for a switch that is off, the metavar is the flag that turns it on
        names = [option.metavar or "/".join((*names, *option.secondary_opts))]
    flags = ", ".join(names) if len(names[0]) == 2 else f"    {', '.join(names)}"
    return flags if option.is_flag or not option.metavar else f"{flags} {option.metavar}"


def _by_panel(items: Iterable[Any], otherwise: str) -> dict[str, list[Any]]:
    panels: dict[str, list[Any]] = {}
    for item in items:
        panels.setdefault(getattr(item, "rich_help_panel", None) or otherwise, []).append(item)
    return panels


def _section(heading: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    """Yield a heading and its rows: the name, and the text beside it, or below a long name."""
    if not rows:
        return
    yield from ("", _styled(f"{heading}:", bold=True))
    column = min(max(len(name) for name, _ in rows), _COLUMN)
    for name, text in rows:
        lines = _wrap(text or "", column + 4)
        fits = len(name) <= column
        styled = f"  {_styled(name, fg='cyan')}"
        yield f"{styled}{' ' * (column - len(name))}  {lines.pop(0)}" if fits else styled
        yield from (" " * (column + 4) + line for line in lines)


def _wrap(text: str, indent: int = 0) -> list[str]:
    width = min(shutil.get_terminal_size().columns, _WIDEST) - indent
    return textwrap.wrap(" ".join(text.split()), max(width, 20), break_on_hyphens=False) or [""]


def _styled(text: str, **style: Any) -> str:
    return text if "NO_COLOR" in os.environ else typer.style(text, **style)


class ClosedPipe(Exception):
    """The reader of stdout has gone away."""


def out() -> Console:
    """Return the console for results: stdout."""
    return _console(stderr=False)


def err() -> Console:
    """Return the console for errors, progress and remarks: stderr."""
    return _console(stderr=True)


@functools.cache
def _console(stderr: bool) -> Console:
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise ClosedPipe  # rich would end the process here

    return Quiet(stderr=stderr, markup=False, highlight=False, emoji=False)


def say(text: str = "", style: str | None = None) -> None:
    """Print a line of a result, unwrapped: terminals wrap it, programs need it whole."""
    out().print(safe(text), style=style, soft_wrap=True)


def remark(text: str) -> None:
    """Print a line for people, which is not part of the result."""
    err().print(safe(text), soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a result for programs."""
    try:
        sys.stdout.write(json.dumps(value, indent=2) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise ClosedPipe from None


def print_error(message: str, hint: str | None) -> None:
    """Print `error:` and `hint:`, with further lines aligned."""
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
    """Print columns without borders. The last column is wrapped on a terminal only."""
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
    """Print a line per field, its label first."""
    width = max((len(label) for label, _ in fields), default=0) + 2
    for label, text in fields:
        say(f"{indent}{label:<{width}}{text}")


def word(value: Any) -> str:
    """Return a value as it is typed: `true`, `none`, `0.001`, `[30,60]`."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(word, value))}]"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
