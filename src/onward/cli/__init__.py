"""The command line: one file for each command or small family. Nothing heavy is loaded before a command runs."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """The entry point of `onward` and of `python -m onward`."""
    from onward.cli.commands import app

    app(prog_name="onward")
