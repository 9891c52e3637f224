"""What becomes of errors: `error:` and `hint:` on stderr, and an exit code."""

from __future__ import annotations

import os
import re
import sys
import traceback
from contextlib import suppress

import typer

from onward.cli import interrupted
from onward.cli.console import ClosedPipe, print_error
from onward.cli.help import usage_of
from onward.errors import Error, near

FAILED, USAGE = 1, 2
CLOSED_PIPE = 141
"""128 and the number of the signal, as shells count."""

BUG = "this is a bug in Onward; run it again with `--debug`, and report what that shows"


class Misuse(typer.TyperException):
    """Arguments that are well-formed, but do not go together."""

    def __init__(self, message: str, hint: str):
        super().__init__(message)
        self.hint = hint


_PLAIN = {
    "Input should be a valid integer.*": "it must be a whole number",
    "Input should be a valid number.*": "it must be a number",
    "Input should be greater than or equal to": "it must be at least",
    "Input should be less than or equal to": "it must be at most",
    r"\.?\s*Choose from:\s*": ": one of ",
    r"^Got unexpected extra argument(?:\(s\)|s)? \((.+)\)": r"unexpected argument `\1`",
    "Value error, ": "",
}
"""How the parser says things, and how we do."""


def report(error: BaseException, debug: bool) -> int:
    """Say what went wrong, with the traceback if that is wanted; the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED if error.code else 0
    if isinstance(error, typer.Abort) and isinstance(error.__cause__, EOFError):  # a file that ends too soon
        error = error.__cause__
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return interrupted()
    if isinstance(error, ClosedPipe | BrokenPipeError):
        _leave_pipe()
        return CLOSED_PIPE
    with suppress(ClosedPipe, BrokenPipeError):  # where nobody hears it, the exit code must do
        if debug:
            traceback.print_exception(error)
        print_error(*_explain(error))
    return USAGE if isinstance(error, typer.TyperException) else FAILED


def _explain(error: BaseException) -> tuple[str, str | None]:
    if isinstance(error, Error | Misuse):
        return str(error), error.hint
    if isinstance(error, typer.TyperException):
        return _usage(error)
    if isinstance(error, MemoryError):
        return "there is not enough memory for this", None
    if isinstance(error, OSError):
        return f"{f'`{error.filename}`: ' if error.filename else ''}{error.strerror or error}", None
    return "".join(traceback.format_exception_only(error)).strip(), BUG


def _usage(error: typer.TyperException) -> tuple[str, str]:
    """The parser's message in the form of ours, and what was meant or where to look."""
    text, *_ = re.split(r" Did you mean | \(Possible options", error.format_message())
    text = re.sub(r"'([^']+)'", r"`\1`", text).strip().rstrip(".")
    for pattern, plain in _PLAIN.items():
        text = re.sub(pattern, plain, text)
    text = " ".join(text.split())
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "onward"
    return text[:1].lower() + text[1:], _meant(text, context) or f"see `{path} --help`"


def _meant(text: str, context: typer.Context | None) -> str | None:
    """What was meant by a word that is not known."""
    if choice := re.search(r"`([^`]+)` is not one of (.+)", text):
        return near(choice[1], re.findall(r"`([^`]+)`", choice[2]))
    unknown = re.search(r"No such (?:command|option):? `?([^` ]+)", text)
    if unknown and context:
        return near(unknown[1], _known(context), likeness=0.6)
    if text.startswith("unexpected argument") and context:
        return f"usage: `{context.command_path} {usage_of(context.command, context.command.params)}`"
    return None


def _known(context: typer.Context) -> list[str]:
    """The options and commands that there are."""
    options = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    return [*options, *getattr(context.command, "commands", ())]


def _leave_pipe() -> None:
    """Nobody reads any more. Python would complain when it flushes at exit, unless there is somewhere to flush to."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
