"""The application that commands enter themselves into, and what holds for all of them."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from onward.cli import INTERRUPTED, console, interrupted
from onward.cli.failure import report
from onward.cli.help import USAGE, help_text

BUILD, LOOK, CHANGE = "Build", "Check and show", "Change, without losing the training"

_Function = TypeVar("_Function", bound=Callable[..., None])


logging.getLogger("onnx_ir").addHandler(logging.NullHandler())  # its remarks about oddities are `check`'s business


def _say_warning(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
    """Warnings are said as errors are; those of other libraries are for their developers."""
    if category is UserWarning:
        console.print_warning(str(message))


class Commands(TyperGroup):
    """All commands. Whatever happens in one ends in an exit code and, if it failed, in `error:` and `hint:`."""

    def get_help(self, ctx: Any) -> str:
        return help_text(self, ctx)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        debug = "--debug" in arguments or os.environ.get("ONWARD_DEBUG", "") not in ("", "0")
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # a name may hold what a terminal cannot show
        options["standalone_mode"] = False  # errors come here
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _say_warning
                code = super().main([a for a in arguments if a != "--debug"], *rest, **options)
            if code == INTERRUPTED:  # what the parser makes of a Ctrl-C, silently
                interrupted()
            sys.stdout.flush()
        except BaseException as error:
            code = report(error, debug)
        sys.exit(code if isinstance(code, int) else 0)


class Command(TyperCommand):
    more: Callable[[], str] | None = None
    """A further paragraph of its help, made when somebody reads it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:  # not all say which command it was
            error.__dict__["ctx"] = getattr(error, "ctx", None) or ctx
            raise

    def get_help(self, ctx: Any) -> str:
        return help_text(self, ctx)


app = typer.Typer(
    name="onward",
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(
    panel: str, *examples: str, name: str | None = None, usage: str = USAGE, more: Callable[[], str] | None = None
) -> Callable[[_Function], _Function]:
    """Enter a function as a command, with examples below its help; `usage` where its signature does not tell."""
    epilog = "\n".join(["Examples:", *(f"  {example}" for example in examples)])
    kind = type("Command", (Command,), {"more": staticmethod(more)}) if more else Command
    return app.command(name, cls=kind, rich_help_panel=panel, epilog=epilog, options_metavar=usage)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        console.say(f"onward {version('onward')}")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    epilog="Each command explains itself, with examples: `onward prepare --help`.",
)
def onward(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where in the code an error arose. So does ONWARD_DEBUG=1.")
    ] = False,
) -> None:
    """ONNX training made real: one .onnx file that holds a model and its training."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
