"""What a format of checkpoints is: how it is known, read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from onward.checkpoint.description import Checkpoint
from onward.checkpoint.naming import Order
from onward.errors import UnsupportedError
from onward.model import Model


class Captured(NamedTuple):
    """What a checkpoint computes, where it holds that, too."""

    model: Model
    loss: Any
    """In words of a recipe; None where it is not known."""
    orders: Mapping[str, Order] = {}
    """In which an optimizer can have been given the parameters, by what says so, with names of the graph."""
    tied: Mapping[str, str] = {}
    """Further names of the checkpoint's tensors."""
    stored: Mapping[str, str] = {}
    """Names of the checkpoint's tensors -> names of the graph, where the framework has others in files."""
    probe: Callable[[Model, Any], None] | None = None
    """Compares the model, with its weights, under a loss with the module that it was captured of."""


def missing_package(error: ModuleNotFoundError) -> Exception:
    """What to say where the model of a checkpoint cannot be made without a package."""
    if str(error.name).startswith("onward"):
        return error
    package, _, part = str(error.name).partition(".")
    if part:
        return UnsupportedError(f"to make its model needs a newer `{package}`", hint=f"pip install -U {package}")
    package = {"torch": "onward[torch]", "keras": "onward[tensorflow]"}.get(package, package)
    return UnsupportedError(
        f"to make its model needs `{error.name}`, which is not installed",
        hint=f"pip install '{package}'; or give the ONNX model that it is of: `--like model.onnx`",
    )


class Format(NamedTuple):
    name: str
    """What users call it: `--to deepspeed`."""
    title: str
    matches: Callable[[Path], bool]
    """Whether a file or folder is of this format, by what is in it. Nothing large is read for that."""
    read: Callable[[Path], Checkpoint]
    write: Callable[[Checkpoint, Path], None] | None = None
    """Writes into a path that does not exist yet. The checkpoint may come from a training model, or from any reader."""
    is_folder: bool = True
    keeps: tuple[str, ...] = ()
    """What the format has a place for: fields of `Checkpoint`."""
    ending: str = ""
    """Of a file."""
    graph: Callable[[Path], Captured] | None = None
    """The model of a checkpoint, where it has one."""
    needs_names: bool = True
    """Whether what optimizers keep has names when it is written."""
    also: tuple[str, ...] = ()
    """Other names of it."""
