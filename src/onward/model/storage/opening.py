"""A model file and its data files, which belong together even if somebody saves over them meanwhile."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from onward.errors import ExternalDataError
from onward.model.storage.external import check_external, data_files
from onward.model.storage.files import PathLike
from onward.model.storage.open_files import DataFile, hold_open
from onward.model.storage.parse import folder_of, read_proto

_ATTEMPTS = 100


@dataclass
class Opened:
    proto: ModelProto
    folder: Path
    files: dict[Path, DataFile]


def open_model(path: PathLike) -> Opened:
    """Parse a model file and hold its data files open, after checking that reading them is safe.

    A save renames the new model file over the old one, and removes old data files last. Whoever has just read the old
    model and finds its data gone reads the new one.
    """
    for attempt in range(_ATTEMPTS):
        before = _identity(path)
        proto, folder = read_proto(path), folder_of(path)
        try:
            check_external(proto, folder)
            return Opened(proto, folder, _held_files(proto, folder))
        except ExternalDataError:
            if _identity(path) == before or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _held_files(proto: ModelProto, folder: Path) -> dict[Path, DataFile]:
    found = {file: hold_open(file) for file in data_files(proto, folder)}
    return {file: source for file, source in found.items() if source is not None}


def _identity(path: PathLike) -> tuple[int, ...] | None:
    if not isinstance(path, str | os.PathLike):  # reading says so; to the system a number is a file that is open
        return None
    try:
        info = os.stat(path)
    except (OSError, ValueError):  # which reading explains
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns
