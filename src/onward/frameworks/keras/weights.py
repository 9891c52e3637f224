"""The arrays of a `.keras` file, which anybody may have written: only what lies in it itself."""

from __future__ import annotations

import math
import mmap
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onward.model.storage.containers import BAD_ZIP, Stored, stored_range
from onward.model.storage.files import blame_file
from onward.model.storage.hdf5 import DAMAGED, read_hdf5

_MEMBER = "model.weights.h5"


def read_weights(path: Path, groups: Iterable[str]) -> dict[str, list[np.ndarray]]:
    """The arrays of groups, in their order; none of a group that is not there."""
    sentence = f"`{path}` is not a file of Keras with weights and an optimizer"
    with (
        blame_file(sentence, *BAD_ZIP, *DAMAGED, KeyError, hint="write it with `model.save`"),
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        zipfile.ZipFile(file) as archive,
    ):
        found = read_hdf5(data, *stored_range(archive, archive.getinfo(_MEMBER)))
        return {name: [_copy(data, array) for array in _in_order(found, name)] for name in groups}


def _in_order(groups: Mapping[str, Mapping[str, Any]], name: str) -> list[Stored | np.ndarray]:
    if inner := next((other for other in groups if other.startswith(f"{name}/")), None):
        raise ValueError(f"`{inner}` is a group, not an array")
    arrays = groups.get(name, {}).get("arrays", {})
    return [arrays[key] for key in sorted(arrays, key=int)]


def _copy(data: mmap.mmap, found: Stored | np.ndarray) -> np.ndarray:
    if isinstance(found, np.ndarray):
        return found
    return np.frombuffer(data, found.dtype, math.prod(found.shape), found.offset).reshape(found.shape).copy()
