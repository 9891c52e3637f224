"""The formats of checkpoints, a file each, and `open_checkpoint`, which recognizes them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

from onward.arguments import checked
from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.formats import (
    accelerate,
    dcp,
    deepspeed,
    flax,
    keras,
    lightning,
    megatron,
    nemo,
    orbax,
    ort,
    pytorch,
    raytrain,
    safetensors,
    tensorflow,
    transformers_trainer,
)
from onward.checkpoint.pytorch.pickles import Named, note_names
from onward.checkpoint.pytorch.trees import is_harmless
from onward.errors import Error, InvalidModelError, UnsupportedError, default_hint
from onward.model import Model, load

FORMATS: tuple[Format, ...] = (
    raytrain.FORMAT,
    deepspeed.FORMAT,
    transformers_trainer.FORMAT,
    accelerate.FORMAT,
    megatron.FORMAT,
    dcp.FORMAT,
    ort.FORMAT,
    tensorflow.FORMAT,
    keras.FORMAT,
    safetensors.FOLDER,
    safetensors.FORMAT,
    nemo.FORMAT,
    lightning.FORMAT,
    pytorch.FORMAT,
    orbax.FORMAT,
    flax.FORMAT,
)
"""The first that matches a file or folder is what it is taken for: what is more particular stands before."""


def writable() -> dict[str, Format]:
    """The formats that can be written, by all their names."""
    return {name: format for format in FORMATS if format.write for name in (format.name, *format.also)}


# ---- opening ---------------------------------------------------------------------------------------------------------

_DAMAGED = "copy it again from where it was saved, all of it; or take an earlier one"


@checked()
def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Look at a checkpoint of another framework. Nothing in it is executed.

        print(onward.open_checkpoint("checkpoint-500"))

    - `path`: a file or a folder

    Tensors stay where they are until their elements are asked for.
    """
    place = Path(path)
    if not place.exists() and (index := place.with_name(f"{place.name}.index")).is_file():
        place = index  # TensorFlow names a checkpoint by what the names of its files begin with
    if not place.exists():
        raise InvalidModelError(f"there is no `{place}`", hint="give a file or folder that is there")
    if (format := format_of(place)) is not None:
        with note_names() as named, default_hint(_DAMAGED):
            checkpoint = format.read(place)
        names = {*checkpoint.executes, *(each.name for each in _code(named, place))}
        return dataclasses.replace(checkpoint, executes=tuple(sorted(names)))
    inside = sorted(each.name for each in place.iterdir() if is_checkpoint(each)) if place.is_dir() else []
    raise UnsupportedError(
        f"`{place}` is of no format that is known",
        hint=f"there is one in it: `{place / inside[-1]}`" if inside else "give what a framework has saved",
    )


def open_either(source: Model | Checkpoint | str | os.PathLike[str]) -> Model | Checkpoint:
    """A model or a checkpoint, of which a path is known by its ending."""
    if isinstance(source, Model | Checkpoint):
        return source
    return load(source) if os.fspath(source).endswith(".onnx") else open_checkpoint(source)


class Code(NamedTuple):
    """A class or function that a checkpoint names."""

    file: str
    name: str
    call: str
    """What it is called with, in short; empty where it is only named."""


def list_code(path: Path) -> tuple[tuple[Code, ...], Error | None]:
    """All that a loader that trusts a checkpoint would have imported, and called where it says so. Nothing is.

    Of one that cannot be read to its end, what it names before that; and what is wrong with it.
    """
    if not path.exists():
        raise InvalidModelError(f"there is no `{path}`", hint="give a file or folder that is there")
    format = format_of(path)
    if format is None:
        raise UnsupportedError(f"`{path}` is no checkpoint", hint="models of ONNX name no code")
    with note_names() as named:
        try:
            with default_hint(_DAMAGED):
                names, wrong = format.read(path).executes, None
        except Error as error:
            names, wrong = (), error
    code = _code(named, path)
    listed = {each.name for each in code}
    return (*code, *(Code(path.name, name, "") for name in names if name not in listed)), wrong


def _code(named: Named, path: Path) -> tuple[Code, ...]:
    found = {
        Code(os.path.relpath(file, path) if path.is_dir() else path.name, str(name), call)
        for (file, name), call in named.items()
        if not is_harmless(name)
    }
    return tuple(sorted(found))


def is_checkpoint(path: Path) -> bool:
    """Whether something looks as if it could be opened."""
    return format_of(path) is not None


def format_of(path: Path) -> Format | None:
    """The format of a file or folder, by what is in it."""
    return next((format for format in FORMATS if format.matches(path)), None)
