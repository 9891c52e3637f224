"""Arrays in zarr, which tensorstore reads and writes: in a database of OCDBT, or each in a folder of its own."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onward.errors import ExternalDataError, InvalidModelError, UnsupportedError
from onward.model.storage.files import reason, regular
from onward.model.storage.stream import advance
from onward.run_state.tensors import Tensor

_CHUNK = 32 << 20
"""Bytes that are written as one chunk, unless a row has more."""
_BATCH = 64 << 20
"""Bytes that are put into the database together."""
_CACHE = {"cache_pool": {"total_bytes_limit": 32 << 20}}
_FREE, _DENSEST = 1 << 30, 1024
"""Bytes that an array may have in any case, and times the size of all files. Nothing but zeros is packed as densely."""


def tensorstore() -> Any:
    """The library."""
    try:
        return importlib.import_module("tensorstore")
    except ImportError as error:
        raise UnsupportedError(
            "checkpoints of Orbax are stored by tensorstore, which is not installed", hint="pip install onward[orbax]"
        ) from error


@dataclass(frozen=True, eq=False)
class ZarrTensor(Tensor):
    """An array in chunks."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    store: Any = field(repr=False)

    def array(self) -> np.ndarray:
        return self._read(self.store)

    def write_to(self, file: BinaryIO) -> None:
        """Write as many rows at a time as are in a chunk."""
        rows = (self.store.chunk_layout.read_chunk.shape or (1,))[0]
        if not self.shape or not rows:
            super().write_to(file)
            return
        for begin in range(0, self.shape[0], rows):
            block = np.ascontiguousarray(self.rows(begin, begin + rows)).reshape(-1).view(np.uint8)
            file.write(block.data)
            advance(block.nbytes)

    def rows(self, begin: int, end: int) -> np.ndarray:
        """A part of it, of which no more is read."""
        return self._read(self.store[begin : min(end, self.shape[0])])

    def _read(self, part: Any) -> np.ndarray:
        try:
            return np.asarray(part.read().result())
        except ValueError as error:
            raise ExternalDataError(
                f"`{self.name}` cannot be read: {_first(error)}", hint="take an earlier one"
            ) from error


def read_arrays(folder: Path, names: Iterable[str], *, ocdbt: bool, version3: bool) -> dict[str, ZarrTensor]:
    """The arrays of these names, of which nothing but their sizes is read."""
    ts, place = tensorstore(), folder.resolve()
    try:  # tensorstore waits for a pipe for ever
        size = sum(regular(path).st_size for path in place.rglob("*") if not path.is_dir())
    except OSError as error:
        raise InvalidModelError(f"`{folder}` is not a whole folder of arrays: {reason(error)}") from None
    context = ts.Context(_CACHE)
    driver = "zarr3" if version3 else "zarr"
    pending = {
        name: ts.open(
            {"driver": driver, "kvstore": _kvstore(place, name, ocdbt)}, open=True, read=True, context=context
        )
        for name in names
    }
    most = max(_FREE, _DENSEST * size)
    found = {}
    for name, future in pending.items():
        try:
            store = future.result()
            tensor = ZarrTensor(name, np.dtype(store.dtype.numpy_dtype), tuple(map(int, store.shape)), store)
        except (ValueError, TypeError) as error:
            raise InvalidModelError(f"`{folder}` has no whole array `{name}`: {_first(error)}") from error
        if tensor.nbytes > most:
            raise InvalidModelError(f"`{name}` of `{folder}` would be {tensor.nbytes:,} bytes, of which few are there")
        found[name] = tensor
    return found


def _kvstore(folder: Path, name: str, ocdbt: bool) -> dict[str, Any]:
    if ocdbt:
        base = {"driver": "file", "path": f"{folder}/"}
        return {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name:
        raise InvalidModelError(f"`{folder}` leads out of itself, to `{name}`")
    return {"driver": "file", "path": f"{folder}/{name}/"}


def _first(error: BaseException) -> str:
    """What tensorstore says, without the whole of what it was asked for."""
    return str(error).partition(" [")[0][:300]


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_arrays(folder: Path, arrays: Iterable[tuple[str, Tensor]]) -> None:
    """Write arrays into a database, a batch at a time."""
    ts, place = tensorstore(), folder.resolve()
    context = ts.Context(_CACHE)
    batch, size = ts.Transaction(), 0
    for name, tensor in arrays:
        rows = _rows(tensor)
        chunk = (rows, *tensor.shape[1:]) if tensor.shape else ()
        store = ts.open(
            {"driver": "zarr", "kvstore": _kvstore(place, name, ocdbt=True), "metadata": {"compressor": None}},
            create=True, dtype=ts.dtype(tensor.dtype), shape=tensor.shape, context=context, transaction=batch,
            chunk_layout=ts.ChunkLayout(chunk_shape=[max(each, 1) for each in chunk]),
        ).result()  # fmt: skip
        for begin, end, block in _blocks(tensor, rows):
            (store[begin:end] if tensor.shape else store).write(block).result()
            size += block.nbytes
            if size > _BATCH:
                batch.commit_async().result()
                batch, size = ts.Transaction(), 0
                store = store.with_transaction(batch)
    batch.commit_async().result()


def _rows(tensor: Tensor) -> int:
    """How many rows are in a chunk."""
    row = tensor.dtype.itemsize * math.prod(tensor.shape[1:])
    return min(max(1, _CHUNK // max(row, 1)), tensor.shape[0]) if tensor.shape else 1


def _blocks(tensor: Tensor, rows: int) -> Iterator[tuple[int, int, np.ndarray]]:
    if not tensor.shape:
        yield 0, 1, tensor.array()
        return
    part = tensor.rows if isinstance(tensor, ZarrTensor) else partial(_part, tensor.array())
    for begin in range(0, tensor.shape[0], rows):
        end = min(begin + rows, tensor.shape[0])
        block = part(begin, end)
        yield begin, end, block
        advance(block.nbytes)


def _part(elements: np.ndarray, begin: int, end: int) -> np.ndarray:
    return elements[begin:end]
