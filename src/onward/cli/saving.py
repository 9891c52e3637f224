"""Writing a model for a command: never over a file that is there, unless that is wanted."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from onward.cli.console import remark
from onward.cli.failure import Misuse
from onward.cli.work import writing
from onward.errors import WriteError

if TYPE_CHECKING:
    from onward import Model

Where = Literal["auto", "overlay", "none", "data", "safetensors"]
"""Where tensors go, as `Model.save` has it."""

_OTHERS = {".pt", ".pth", ".keras", ".h5", ".hdf5", ".safetensors", ".npz", ".tflite"}
"""Endings that say that a file is something else."""


@dataclass
class Target:
    """Where a result goes, settled before the work that makes it."""

    source: Path
    path: Path
    data: Where = "auto"
    _before: frozenset[str] = frozenset()
    """What was in the folder when it was written."""

    def save(self, model: Model) -> None:
        from onward.model.storage.files import listing

        self._before = frozenset(entry.name for entry in listing(self.path.parent))
        with writing(f"writing {self.path}", self.source):
            model.save(self.path, data=self.data)

    def write(self, model: Model, note: str = "") -> None:
        """Save, and say so."""
        self.save(model)
        remark(f"wrote {self.described()}{f': {note}' if note else ''}")

    def described(self, *others: Path) -> str:
        """The file and new ones beside it that hold its tensors, how large they are; and where other tensors stay.

        `others` were written, too.
        """
        from onward.model.storage import data_files_of

        folder = self.path.parent
        data = [folder / file.relative_to(os.path.realpath(folder)) for file in data_files_of(self.path)]
        new = [file for file in data if file.parent == folder and file.name not in self._before]
        stay = [str(file) for file in data if file not in new]
        written = " and ".join([*(f"{file} ({_size(file)})" for file in [self.path, *new]), *map(str, others)])
        return written + (f"; tensors in {' and '.join(stay)} stay there" if stay else "")


def _size(file: Path) -> str:
    """As large as a file is; and what it takes on the disk, where zeros in it take no room."""
    from onward.inspect.formatting import size

    info = file.stat()
    room = getattr(info, "st_blocks", info.st_size) * 512
    return size(info.st_size) + (f", {size(room)} on disk" if room < info.st_size // 2 else "")


def target(source: Path, output: Path | None, ending: str, *, data: Where = "auto", force: bool = False) -> Target:
    """The file to write: `output`, a file in it if it is a folder, or `model-ending.onnx` beside `model.onnx`."""
    name = f"{source.name.removesuffix('.onnx')}-{ending}.onnx"
    path = source.parent / name if output is None else output / name if output.is_dir() else output
    if path.suffix in _OTHERS:
        hint = f"write to `{path.with_suffix('.onnx')}`; `onward convert` writes files of frameworks"
        raise Misuse(f"`{path}` is no name for an ONNX model, which is what is written", hint)
    if not force:
        refuse_to_overwrite(path, source)
    if not path.parent.is_dir():
        raise WriteError(f"there is no folder `{path.parent}` to write `{path.name}` to", hint="create it first")
    if not os.access(path.parent, os.W_OK):
        raise WriteError(f"the folder `{path.parent}` cannot be written to", hint="write elsewhere with `-o`")
    return Target(source, path, data)


def refuse_to_overwrite(path: Path, source: Path | None = None) -> None:
    """Fail if there is a file already; `source` is the model that a command reads."""
    if path.exists():
        is_source = source is not None and source.exists() and path.samefile(source)
        what = f"`{path}` is the model itself" if is_source else f"`{path}` exists"
        raise WriteError(what, hint="write elsewhere with `-o`, or overwrite it with `--force`")
