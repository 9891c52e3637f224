"""All commands, in the order of `onward --help`."""

# ruff: noqa: I001
from onward.cli.app import app
from onward.cli import train, evaluate, build, pipeline, convert, check, show, change

__all__ = ["app", "build", "change", "check", "convert", "evaluate", "pipeline", "show", "train"]
