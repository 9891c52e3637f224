"""Opening a checkpoint: what it is, by what is in it, and what it holds."""

from __future__ import annotations

import os
from pathlib import Path

from onward.arguments import checked
from onward.checkpoint.description import Checkpoint
from onward.checkpoint.format import Format
from onward.checkpoint.formats import FORMATS
from onward.errors import InvalidModelError, UnsupportedError


@checked()
def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Look at a checkpoint of another framework: a file or a folder. Nothing in it is executed.

    Tensors stay where they are until their elements are asked for.
    """
    place = Path(path)
    if not place.exists():
        raise InvalidModelError(f"there is no `{place}`")
    if (format := format_of(place)) is not None:
        return format.read(place)
    inside = sorted(each.name for each in place.iterdir() if is_checkpoint(each)) if place.is_dir() else []
    raise UnsupportedError(
        f"`{place}` is of no format that is known",
        hint=f"there is one in it: `{place / inside[-1]}`" if inside else "give what a framework has saved",
    )


def is_checkpoint(path: Path) -> bool:
    """Whether something looks as if it could be opened."""
    return format_of(path) is not None


def format_of(path: Path) -> Format | None:
    """The format of a file or folder, by what is in it."""
    return next((format for format in FORMATS if format.matches(path)), None)
