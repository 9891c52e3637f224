"""HDF5 as Keras writes it, in a file or in a part of one: what lies where. Only what is in the file itself is touched.

HDF5 can point to other files of the machine, in circles, and unpack to any size: none of it is followed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from onward.checkpoint.archive import Window
from onward.checkpoint.tensors import ArrayTensor, StoredTensor, Tensor, contiguous
from onward.errors import InvalidModelError, UnsupportedError, first_line

MAGIC = b"\x89HDF\r\n\x1a\n"
_DAMAGED = (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError, EOFError)
"""What `h5py` raises where bytes are none of its."""
_MOST_OBJECTS, _DEEPEST, _COMPACT = 1_000_000, 64, 1 << 16
_BFLOAT16 = {"dtype": "bfloat16"}
"""The attribute that Keras gives to arrays of a type that HDF5 has not."""

Groups = Mapping[str, Mapping[str, Any]]
"""By path: the attributes of a group, and its arrays."""


def h5py() -> ModuleType:
    try:
        import h5py
    except ImportError as error:
        raise UnsupportedError("files of Keras are HDF5, for which h5py is missing", hint="pip install h5py") from error
    return h5py


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_h5(path: Path, start: int = 0, length: int | None = None) -> dict[str, dict[str, Any]]:
    """The groups of a file, or of the part of it that begins at `start`; arrays are places in it."""
    library = h5py()
    try:
        with open(path, "rb") as file:
            size = file.seek(0, io.SEEK_END)
            part = Window(file, start, size - start if length is None else length)
            with library.File(part, "r") as opened:
                reader = _Reader(path, start, size if length is None else start + length)
                return dict(reader.groups(opened, "", 0))
    except InvalidModelError:
        raise
    except _DAMAGED as error:
        raise InvalidModelError(f"`{path}` is not a whole HDF5 file: {first_line(error)}") from error


class _Reader:
    def __init__(self, path: Path, start: int, end: int):
        self._path, self._start, self._end = path, start, end
        self._seen: set[int] = set()

    def groups(self, group: Any, path: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
        library, arrays = h5py(), {}
        self._count(group, depth)
        inner = []
        for key in group:
            if not isinstance(group.get(key, getlink=True), library.HardLink):
                raise ValueError(f"`{key}` is a link to somewhere else")
            found = group[key]
            if isinstance(found, library.Dataset):
                self._count(found, depth)
                arrays[key] = self._array(found)
            elif isinstance(found, library.Group):
                inner.append((key, found))
            else:
                raise ValueError(f"`{key}` is a {type(found).__name__}")
        attributes = {name: _text(value) for name, value in group.attrs.items() if isinstance(value, str | bytes)}
        yield path, {"attributes": attributes, "arrays": arrays}
        for key, found in inner:
            yield from self.groups(found, f"{path}/{key}".lstrip("/"), depth + 1)

    def _count(self, found: Any, depth: int) -> None:
        """Refuse circles, and files that have no end."""
        address = int(h5py().h5o.get_info(found.id).addr)
        if address in self._seen:
            raise ValueError(f"`{found.name}` is in it twice")
        self._seen.add(address)
        if len(self._seen) > _MOST_OBJECTS or depth > _DEEPEST:
            raise ValueError("it holds more than any model does")

    def _array(self, dataset: Any) -> Tensor:
        if dataset.external or dataset.is_virtual:
            raise ValueError(f"the elements of `{dataset.name}` are in other files")
        if dataset.chunks is not None:
            raise ValueError(f"`{dataset.name}` is packed: save it again with Keras")
        dtype, shape = _type(dataset), tuple(map(int, dataset.shape))
        if not dataset.size:
            return ArrayTensor(np.zeros(shape, dtype))
        offset = dataset.id.get_offset()
        if offset is None:
            return self._compact(dataset, dtype)
        made = StoredTensor(self._path, self._start + offset, dtype, shape, contiguous(shape))
        if made.end > self._end:
            raise ValueError(f"`{dataset.name}` lies outside of the file")
        return made

    def _compact(self, dataset: Any, dtype: np.dtype) -> Tensor:
        """What is so small that it lies with its description."""
        if dataset.nbytes > _COMPACT:
            raise ValueError(f"the elements of `{dataset.name}` are not in it")
        return ArrayTensor(np.array(dataset).view(dtype))


def _type(dataset: Any) -> np.dtype:
    dtype = np.dtype(dataset.dtype)
    if dataset.attrs.get("dtype") == _BFLOAT16["dtype"] and dtype.itemsize == 2:
        return np.dtype(ml_dtypes.bfloat16)
    if dtype.kind not in "biuf" or dtype.hasobject or not dtype.isnative:
        raise ValueError(f"`{dataset.name}` is of {dtype}")
    return dtype


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_h5(file: Path | BinaryIO, groups: Groups) -> None:
    """Write groups, an array after the other."""
    with h5py().File(file, "w") as opened:
        for path, group in groups.items():
            made = opened.require_group(f"/{path}")
            for name, value in group["attributes"].items():
                made.attrs[name] = value
            for key, tensor in group["arrays"].items():
                written = made.create_dataset(key, data=tensor.array())
                if tensor.dtype == ml_dtypes.bfloat16:
                    written.attrs.update(_BFLOAT16)
