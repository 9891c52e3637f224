"""Formats of checkpoints, one file each, and `open_checkpoint`, which recognizes them."""

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
    gguf,
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
    trees,
)
from onward.checkpoint.pytorch.contents import is_harmless
from onward.checkpoint.pytorch.pickle_reader import Named, note_names
from onward.errors import Error, InvalidModelError, UnsupportedError, default_hint
from onward.model import Model, load
from onward.model.storage.remote import fetched

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
    gguf.FORMAT,
    pytorch.FOLDER,
    safetensors.FOLDER,
    safetensors.FORMAT,
    nemo.FORMAT,
    lightning.FORMAT,
    pytorch.FORMAT,
    orbax.FORMAT,
    flax.FORMAT,
    trees.FORMAT,
    trees.EQUINOX,
)
"""The first that matches a file or folder counts; special formats come before general ones."""


def writable() -> dict[str, Format]:
    """Return the formats that can be written, by all their names."""
    return {name: format for format in FORMATS if format.write for name in (format.name, *format.also)}


_DAMAGED = "copy it again from where it was saved, all of it; or take an earlier one"


@checked()
def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint of another framework. Nothing in it is executed.

        print(onward.open_checkpoint("checkpoint-500"))

    - `path`: a file or a folder

    Tensors stay on disk until their elements are read.
    """
    location = Path(fetched(path))
    if not location.exists() and (index := location.with_name(f"{location.name}.index")).is_file():
        location = index  # TensorFlow names a checkpoint by the prefix of its files
    if (format := format_of(location)) is not None:
        with note_names() as named, default_hint(_DAMAGED):
            checkpoint = format.read(location)
        names = {*checkpoint.executes, *(code.name for code in _code(named, location))}
        return dataclasses.replace(checkpoint, executes=tuple(sorted(names)))
    if pytorch.is_packed(location):
        raise UnsupportedError(
            f"`{location}` is a zip file with files of PyTorch", hint=f"unpack it: `unzip {location} -d unpacked`"
        )
    inside = sorted(child.name for child in location.iterdir() if is_checkpoint(child)) if location.is_dir() else []
    raise UnsupportedError(
        f"`{location}` has no known checkpoint format",
        hint=f"open the checkpoint in it: `{location / inside[-1]}`"
        if inside
        else "give a file or folder that a framework saved",
    )


def open_either(source: Model | Checkpoint | str | os.PathLike[str]) -> Model | Checkpoint:
    """Return a model or a checkpoint. A path that ends in `.onnx` is a model."""
    if isinstance(source, Model | Checkpoint):
        return source
    return load(source) if os.fspath(source).endswith(".onnx") else open_checkpoint(source)


class CodeReference(NamedTuple):
    """Class or function that a checkpoint names."""

    file: str
    name: str
    call: str
    """Abbreviated arguments; empty if it is only named."""


def list_code(path: Path) -> tuple[tuple[CodeReference, ...], Error | None]:
    """Return the code that a trusting loader would import or call, and an error if reading failed.

    Nothing is imported or called. CodeReference that is named before the error is listed.
    """
    if (format := format_of(path)) is None:
        raise UnsupportedError(f"`{path}` is not a checkpoint", hint="ONNX models name no code")
    with note_names() as named:
        try:
            with default_hint(_DAMAGED):
                names, failure = format.read(path).executes, None
        except Error as error:
            names, failure = (), error
    code = _code(named, path)
    listed = {entry.name for entry in code}
    return (*code, *(CodeReference(path.name, name, "") for name in names if name not in listed)), failure


def _code(named: Named, path: Path) -> tuple[CodeReference, ...]:
    entries = {
        CodeReference(os.path.relpath(file, path) if path.is_dir() else path.name, str(name), call)
        for (file, name), call in named.items()
        if not is_harmless(name)
    }
    return tuple(sorted(entries))


def is_checkpoint(path: Path) -> bool:
    """True for a file or folder of a known format."""
    return any(format.matches(path) for format in FORMATS)


def format_of(path: Path) -> Format | None:
    """Return the format of a file or folder, by its content."""
    if not path.exists():
        raise InvalidModelError(f"`{path}` does not exist", hint="check the path")
    return next((format for format in FORMATS if format.matches(path)), None)
