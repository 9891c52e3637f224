"""The application that commands register with, and its error handling."""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from onward.cli import INTERRUPTED, console, say_interrupted
from onward.cli.console import USAGE, ClosedPipe, help_text, print_error, usage_of
from onward.errors import MEMORY_HINT, Error, lacks_memory, suggest

BUILD, LOOK, CHANGE = "Train and build", "Check and show", "Change a model and keep its training"


_Function = TypeVar("_Function", bound=Callable[..., None])


logging.getLogger("onnx_ir").addHandler(logging.NullHandler())  # `onward check` reports what it would log


def _say_warning(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
    """Print a warning for users, in the form of an error. Drop those for developers of libraries."""
    if category is UserWarning:
        console.print_warning(str(message))


_FORMER_COMMANDS = {"show": "describe", "grad": "gradient"}
"""Former names of commands -> current names. They work until the next release."""


class Commands(TyperGroup):
    """All commands. A failure ends with an exit code and the lines `error:` and `hint:`."""

    def get_help(self, ctx: Any) -> str:
        return help_text(self, ctx)

    def get_command(self, ctx: Any, name: str) -> Any:
        return super().get_command(ctx, _FORMER_COMMANDS.get(name, name))

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        debug = "--debug" in arguments or os.environ.get("ONWARD_DEBUG", "") not in ("", "0")
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # names may hold what a terminal cannot show
        options["standalone_mode"] = False  # so that exceptions reach `report`
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _say_warning
                code = super().main([a for a in arguments if a != "--debug"], *rest, **options)
            if code == INTERRUPTED:  # the parser returns it on Ctrl-C and prints nothing
                say_interrupted()
            sys.stdout.flush()
        except BaseException as error:
            code = report(error, debug)
        sys.exit(code if isinstance(code, int) else 0)


class Command(TyperCommand):
    more: Callable[[], str] | None = None
    """Last paragraph of the help, made when the help is printed."""
    formerly: Mapping[str, str] = {}
    """Former flags -> current flags. They work until the next release."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        reads = [
            argument if flag in ("-o", "--output") else _local(argument) for flag, argument in pairwise(["", *args])
        ]
        flags = [argument.partition("=") for argument in reads]
        try:
            return super().parse_args(
                ctx, [f"{self.formerly.get(flag, flag)}{equals}{value}" for flag, equals, value in flags]
            )
        except typer.TyperException as error:  # not every error has its context
            error.__dict__["ctx"] = getattr(error, "ctx", None) or ctx
            raise

    def get_help(self, ctx: Any) -> str:
        return help_text(self, ctx)


def _local(argument: str) -> str:
    """Return an argument with a path on this machine in place of a URL: `hf://org/model/model.onnx`."""
    if "://" not in argument:
        return argument
    from onward.model.storage.remote import fetched

    flag, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return argument if flag == "--output" else f"{flag}{equals}{fetched(value)}"


app = typer.Typer(
    name="onward",
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(
    panel: str,
    *examples: str,
    name: str | None = None,
    usage: str = USAGE,
    about: Callable[[], str] | None = None,
    parameters: Iterable[inspect.Parameter] = (),
    formerly: Mapping[str, str] = {},
) -> Callable[[_Function], _Function]:
    """Register a function as a command, with examples below its help.

    `usage` replaces the usage line made from the signature. `parameters` stand for keywords of the
    function (`**`) and come before its keyword-only parameters. `formerly` maps former flags to
    current ones, until the next release.
    """
    epilog = "\n".join(["Examples:", *(f"  {example}" for example in examples)])
    cls = type("Command", (Command,), {"more": staticmethod(about) if about else None, "formerly": formerly})

    def enter(function: _Function) -> _Function:
        shared = list(parameters)
        own = [p for p in parameters_of(function) if p.name not in {parameter.name for parameter in shared}]
        last = [p for p in own if p.kind is p.KEYWORD_ONLY]
        ordered = [p for p in own if p not in last] + shared + last
        function.__dict__["__signature__"] = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in ordered])
        return app.command(name, cls=cls, rich_help_panel=panel, epilog=epilog, options_metavar=usage)(function)

    return enter


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the named parameters of a function, with evaluated annotations."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]


def _version(is_set: bool) -> None:
    if is_set:
        from importlib.metadata import version

        console.say(f"onward {version('onward')}")
        raise typer.Exit


@app.callback(invoke_without_command=True, epilog="Run `onward COMMAND --help` for options and examples of a command.")
def onward(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print the traceback of an error, as ONWARD_DEBUG=1 does.")
    ] = False,
) -> None:
    """Train ONNX models: one .onnx file holds a model and its training."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# ---- errors ----------------------------------------------------------------------------------------------------------


FAILED, MISUSED = 1, 2
CLOSED_PIPE = 141
"""Exit code after a closed pipe: 128 plus the number of the signal, as in a shell."""

BUG = "this is a bug in Onward; run it again with `--debug` and report the traceback"


class Misuse(typer.TyperException):
    """Valid arguments that cannot be combined."""

    def __init__(self, message: str, hint: str):
        super().__init__(message)
        self.hint = hint


_PLAIN = {
    "Input should be a valid integer.*": "it must be an integer",
    "Input should be a valid number.*": "it must be a number",
    "Input should be greater than or equal to": "it must be at least",
    "Input should be less than or equal to": "it must be at most",
    r"\.?\s*Choose from:\s*": ": one of ",
    r"^Got unexpected extra argument(?:\(s\)|s)? \((.+)\)": r"unexpected argument `\1`",
    "Value error, ": "",
}
"""Messages of the parser -> messages of Onward."""


_PATIENCE = 2.0
"""Seconds after which torchrun has stopped all processes when one has failed."""


def report(error: BaseException, debug: bool) -> int:
    """Print an error, with `debug` also its traceback, and return the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED if error.code else 0
    if isinstance(error, typer.Abort) and isinstance(error.__cause__, EOFError):  # a truncated file, not a Ctrl-C
        error = error.__cause__
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return say_interrupted()
    if isinstance(error, ClosedPipe | BrokenPipeError):
        _leave_pipe()
        return CLOSED_PIPE
    with suppress(ClosedPipe, BrokenPipeError):
        if int(os.environ.get("RANK", "0")):  # the first process prints the error for all
            time.sleep(_PATIENCE)  # torchrun stops this one meanwhile
        if debug:
            traceback.print_exception(error)
        print_error(*_explain(error))
    return MISUSED if isinstance(error, typer.TyperException) else FAILED


def _explain(error: BaseException) -> tuple[str, str | None]:
    if isinstance(error, Error | Misuse):
        return error.message, error.hint
    if isinstance(error, typer.TyperException):
        return _usage(error)
    if lacks_memory(error):
        return "not enough memory", MEMORY_HINT
    if isinstance(error, OSError):
        return f"{f'`{error.filename}`: ' if error.filename else ''}{error.strerror or error}", None
    return "".join(traceback.format_exception_only(error)).strip(), BUG


def _usage(error: typer.TyperException) -> tuple[str, str]:
    """Return the parser's message in the form of Onward's, and a hint."""
    text, *_ = re.split(r" Did you mean | \(Possible options", error.format_message())
    text = re.sub(r"'([^']+)'", r"`\1`", text).strip().rstrip(".")
    for pattern, plain in _PLAIN.items():
        text = re.sub(pattern, plain, text)
    text = " ".join(text.split())
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "onward"
    return text[:1].lower() + text[1:], _guess(text, context) or f"see `{path} --help`"


def _guess(text: str, context: typer.Context | None) -> str | None:
    """Return a hint for an unknown word, or None."""
    if choice := re.search(r"`([^`]+)` is not one of (.+)", text):
        return suggest(choice[1], re.findall(r"`([^`]+)`", choice[2]))
    unknown = re.search(r"No such (?:command|option):? `?([^` ]+)", text)
    if unknown and context:
        options = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
        return suggest(unknown[1], [*options, *getattr(context.command, "commands", ())], likeness=0.6)
    if text.startswith("unexpected argument") and context:
        return f"usage: `{context.command_path} {usage_of(context.command, context.command.params)}`"
    return None


def _leave_pipe() -> None:
    """Redirect stdout to nowhere: Python complains at exit if it cannot flush."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
