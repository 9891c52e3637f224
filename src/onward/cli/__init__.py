"""The command line: one file for each command or small family. Nothing heavy is loaded before a command runs."""

from __future__ import annotations

import sys
from contextlib import suppress

__all__ = ["INTERRUPTED", "main", "say_interrupted"]

INTERRUPTED = 130
"""128 and the number of the signal, as shells count."""


def main() -> None:
    """The entry point of `onward` and of `python -m onward`."""
    try:
        from onward.cli.commands import app

        app(prog_name="onward")
    except KeyboardInterrupt:  # while the commands were loaded: else they end themselves
        sys.exit(say_interrupted())


def say_interrupted() -> int:
    """Say that a Ctrl-C has ended it; the exit code."""
    with suppress(OSError):
        sys.stderr.write("interrupted\n")
    return INTERRUPTED
