"""The HDF5 files of Keras: groups of arrays, which are places in them."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from onward.errors import UnsupportedError
from onward.model.storage.files import blame_file
from onward.model.storage.hdf5 import BFLOAT16, DAMAGED, read_hdf5
from onward.model.storage.headers import Stored
from onward.run_state.tensors import ArrayTensor, StoredTensor, Tensor, contiguous_strides

_LARGE = 1 << 16
"""Bytes of an array from which on it is written a part at a time."""

Groups = Mapping[str, Mapping[str, Any]]
"""By path: the attributes of a group, and its arrays."""


def read_h5(path: Path, start: int = 0, length: int | None = None) -> dict[str, dict[str, Any]]:
    """The groups of a file, or of the part of it that begins at `start`; arrays are places in it."""
    with (
        blame_file(f"`{path}` is not a whole HDF5 file of Keras", *DAMAGED),
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        groups = read_hdf5(data, start, length)
        for group in groups.values():
            group["arrays"] = {key: _tensor(path, array) for key, array in group["arrays"].items()}
        return groups


def _tensor(path: Path, found: Stored | np.ndarray) -> Tensor:
    if isinstance(found, np.ndarray):
        return ArrayTensor(found)
    return StoredTensor(path, found.offset, found.dtype, found.shape, contiguous_strides(found.shape))


def h5py() -> ModuleType:
    try:
        import h5py
    except ImportError as error:
        raise UnsupportedError("files of Keras are HDF5, which h5py writes", hint="pip install h5py") from error
    return h5py


def write_h5(path: Path, groups: Groups) -> None:
    """Write groups. Large arrays get their place first, and then their elements, a part at a time."""
    library, places = h5py(), []
    early = library.h5p.create(library.h5p.DATASET_CREATE)
    early.set_alloc_time(library.h5d.ALLOC_TIME_EARLY)
    early.set_fill_time(library.h5d.FILL_TIME_NEVER)
    with library.File(path, "w") as opened:
        for name, group in groups.items():
            made = opened.require_group(f"/{name}")
            for attribute, value in group["attributes"].items():
                made.attrs[attribute] = value
            for key, tensor in group["arrays"].items():
                is_large = tensor.nbytes > _LARGE
                given = {"shape": tensor.shape, "dtype": tensor.dtype, "dcpl": early}
                written = made.create_dataset(key, **(given if is_large else {"data": tensor.array()}))
                if tensor.dtype == ml_dtypes.bfloat16:
                    written.attrs.update(BFLOAT16)
                if is_large:
                    places.append((written.id.get_offset(), tensor))
    with open(path, "r+b") as file:
        for offset, tensor in places:
            file.seek(offset)
            tensor.write_to(file)
