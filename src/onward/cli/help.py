"""What `--help` prints: usage, arguments and options under their headings, commands in groups, examples."""

from __future__ import annotations

import inspect
import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import typer

USAGE = "[OPTIONS]"
_WIDEST, _COLUMN = 100, 26


def help_text(command: Any, context: Any) -> str:
    """The help of a command, or of the group of all commands."""
    return "\n".join(line.rstrip() for line in _lines(command, context))


def _lines(command: Any, context: Any) -> Iterator[str]:
    summary, *paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    parameters = [parameter for parameter in command.get_params(context) if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    commands = getattr(command, "commands", {})
    yield from _wrap(summary)
    yield from ("", f"{_heading('Usage:')} {context.command_path} {usage_of(command, parameters)}")
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
    """What must be given, and that more may be."""
    if command.options_metavar != USAGE:
        return str(command.options_metavar)
    required = [
        p.metavar if p.param_type_name == "argument" else f"{p.opts[0]} {p.metavar}" for p in parameters if p.required
    ]
    return " ".join([*(["COMMAND"] if hasattr(command, "commands") else required), USAGE])


def _flags(option: Any) -> str:
    names = sorted(option.opts, key=len)
    if option.secondary_opts:  # of a switch that is off, the metavar is all that is of interest
        names = [option.metavar or "/".join((*names, *option.secondary_opts))]
    flags = ", ".join(names) if len(names[0]) == 2 else f"    {', '.join(names)}"
    return flags if option.is_flag or not option.metavar else f"{flags} {option.metavar}"


def _by_panel(items: Iterable[Any], otherwise: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for item in items:
        found.setdefault(getattr(item, "rich_help_panel", None) or otherwise, []).append(item)
    return found


def _section(heading: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    """Names on the left, what they are on the right; below, where a name is too long for that."""
    if not rows:
        return
    yield from ("", _heading(f"{heading}:"))
    column = min(max(len(name) for name, _ in rows), _COLUMN)
    for name, text in rows:
        lines = _wrap(text or "", column + 4)
        beside = len(name) <= column
        yield f"  {_name(name)}{' ' * (column - len(name))}  {lines.pop(0)}" if beside else f"  {_name(name)}"
        yield from (" " * (column + 4) + line for line in lines)


def _wrap(text: str, indent: int = 0) -> list[str]:
    width = min(shutil.get_terminal_size().columns, _WIDEST) - indent
    return textwrap.wrap(" ".join(text.split()), max(width, 20), break_on_hyphens=False) or [""]


def _heading(text: str) -> str:
    return text if "NO_COLOR" in os.environ else typer.style(text, bold=True)


def _name(text: str) -> str:
    return text if "NO_COLOR" in os.environ else typer.style(text, fg="cyan")
