"""Command line: one file for each command or small family of commands.

A command imports heavy libraries only when it runs.
"""

from __future__ import annotations

import sys
from contextlib import suppress

__all__ = ["INTERRUPTED", "main", "say_interrupted"]

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 plus the number of the signal, as in a shell."""


def main() -> None:
    """Run the command line: the entry point of `onward` and of `python -m onward`."""
    try:
        from onward.cli.commands import app

        app(prog_name="onward")
    except KeyboardInterrupt:  # while the commands load; a running command handles it itself
        sys.exit(say_interrupted())


def say_interrupted() -> int:
    """Print `interrupted` and return the exit code."""
    with suppress(OSError):
        sys.stderr.write("interrupted\n")
    return INTERRUPTED
