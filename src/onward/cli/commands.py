"""All commands, in the order in which `onward --help` lists them."""

# ruff: noqa: I001
from onward.cli.app import app
from onward.cli import (
    train,
    prepare,
    grad,
    lower,
    convert,
    check,
    check_gradients,
    verify,
    engines,
    show,
    diff,
    report,
    settings,
    names,
    parts,
    form,
    training,
)

__all__ = [
    "app", "check", "check_gradients", "convert", "diff", "engines", "form", "grad", "lower", "names", "parts",
    "prepare", "report", "settings", "show", "train", "training", "verify",
]  # fmt: skip
