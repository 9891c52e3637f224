"""The arrays of a `.keras` file, which anybody may have written: only what lies in it itself, and is as large as asked.

HDF5 can point to other files of the machine, and unpack to any size: neither is followed.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from onward.errors import InvalidModelError, first_line

Shapes = Mapping[str, Sequence[tuple[int, ...]]]
"""By group: the shapes of its arrays, in their order."""

_MEMBER = "model.weights.h5"
_ROOM = 64 << 20
"""Bytes beside the arrays, and of a chunk."""
_DAMAGED = (
    OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError, EOFError, zlib.error,
    zipfile.BadZipFile,
)  # fmt: skip
"""What `zipfile` and `h5py` raise where bytes are none of theirs."""


def read_weights(path: Path, wanted: Shapes) -> dict[str, list[np.ndarray]]:
    """The arrays of a file that are wanted; of one that has another shape, nothing but that."""
    most = 8 * sum(math.prod(shape) for shapes in wanted.values() for shape in shapes) * 2 + _ROOM
    try:
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo(_MEMBER)
            if info.file_size > most:
                raise ValueError(f"`{_MEMBER}` unpacks to {info.file_size} bytes, more than the training model needs")
            data = archive.read(info)
        with h5py.File(io.BytesIO(data), "r") as weights:
            return {name: _group(weights, name, shapes) for name, shapes in wanted.items()}
    except _DAMAGED as error:
        raise InvalidModelError(
            f"`{path}` is not a file of Keras with weights and an optimizer: {first_line(error)}",
            hint="write it with `model.save`",
        ) from error


def _group(weights: Any, name: str, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    group = weights
    for part in name.split("/"):
        if part not in group:
            return []
        group = _inside(group, part, h5py.Group)
    keys = sorted(group, key=int)
    return [_array(_inside(group, key, h5py.Dataset), shape) for key, shape in zip(keys, shapes, strict=False)]


def _inside(group: Any, key: str, kind: type) -> Any:
    """A part of a group, if it is in the file itself."""
    if not isinstance(group.get(key, getlink=True), h5py.HardLink):
        raise ValueError(f"`{key}` is a link to somewhere else")
    found = group[key]
    if not isinstance(found, kind):
        raise ValueError(f"`{key}` is a {type(found).__name__}, not a {kind.__name__}")
    return found


def _array(dataset: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The elements, if they have the shape that is expected; else only the shape, of nothing."""
    if dataset.external or dataset.is_virtual:
        raise ValueError(f"the elements of `{dataset.name}` are in other files")
    if dataset.dtype.kind not in "biufV" or dataset.dtype.hasobject or dataset.dtype.subdtype is not None:
        raise ValueError(f"`{dataset.name}` is of {dataset.dtype}")
    if dataset.shape != shape:
        return np.broadcast_to(np.zeros((), dataset.dtype), dataset.shape)
    if dataset.chunks is not None and math.prod(dataset.chunks) * dataset.dtype.itemsize > dataset.nbytes + _ROOM:
        raise ValueError(f"`{dataset.name}` is packed in pieces that are larger than it is")
    return np.array(dataset)
