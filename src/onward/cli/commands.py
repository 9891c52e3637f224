"""All commands, in the order in which `onward --help` lists them."""

# ruff: noqa: I001
from onward.cli.app import app
from onward.cli import train, prepare, grad, lower, convert, check, show, settings, change

__all__ = ["app", "change", "check", "convert", "grad", "lower", "prepare", "settings", "show", "train"]
