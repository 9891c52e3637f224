"""A tree as Orbax stores it in a folder: a table of the places of a tree, arrays in zarr, and strings.

tensorstore reads and writes arrays in zarr: in a database of OCDBT, or each in a folder of its own.
"""

from __future__ import annotations

import base64
import importlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from onward.checkpoint.pytree import DATA, KEY, Way, nest, parts, with_lists
from onward.checkpoint.safetensors_files import read_json, write_json
from onward.errors import ExternalDataError, InvalidModelError, UnsupportedError
from onward.model.storage.files import SENSELESS, advance, blame_file, reason, regular
from onward.run_state.tensors import ArrayTensor, Tensor

TREE = "_METADATA"
_STRINGS, _SHARDING, _ARRAYS = "_strings.json", "_sharding", "array_metadatas"
_KIND = "random_key_impl"
_IN_LIST, _IN_DICT = 1, 2
_ARRAY = "np.ndarray"
"""What is written for arrays, which become JAX's where those are asked for, on whatever devices there are."""
_EMPTY: dict[str, Any] = {"None": None, "NamedTuple": None, "Dict": {}, "List": [], "Tuple": []}
_DEEPEST = 100


class _Entry(NamedTuple):
    way: Way
    in_list: tuple[bool, ...]
    kind: str

    @property
    def name(self) -> str:
        """Of its array."""
        return ".".join(self.way)


def read_tree(folder: Path) -> Any:
    """The tree of a folder, with arrays as places."""
    table = read_json(folder / TREE)
    entries = _entries(folder / TREE, table.get("tree_metadata"))
    strings = read_json(folder / _STRINGS) if (folder / _STRINGS).is_file() else {}
    stored = [entry.name for entry in entries if entry.kind not in _EMPTY and entry.kind != "string"]
    ocdbt, version3 = table.get("use_ocdbt", (folder / "manifest.ocdbt").exists()), table.get("use_zarr3", False)
    arrays = read_arrays(folder, stored, ocdbt=bool(ocdbt), version3=bool(version3))
    keys = _keys(folder)
    leaves: dict[Way, Any] = {}
    for entry in entries:
        if entry.kind in _EMPTY:
            leaf = _EMPTY[entry.kind]
        elif entry.kind == "string":
            leaf = strings.get(entry.name)
        elif entry.name in keys:
            leaf = {KEY: keys[entry.name], DATA: arrays[entry.name]}
        else:
            array = arrays[entry.name]
            leaf = array.array()[()] if entry.kind == "scalar" and not array.shape else array
        leaves[entry.way] = leaf
    if [*leaves] == [()]:
        return leaves[()]
    lists = {entry.way[:depth] for entry in entries for depth, is_list in enumerate(entry.in_list) if is_list}
    with blame_file(f"`{folder / TREE}` is no table of a tree"):
        return with_lists(nest(leaves.items()), lists)


def _entries(path: Path, table: Any) -> list[_Entry]:
    entries = []
    with blame_file(f"`{path}` is not the table of a tree", *SENSELESS):
        for described in table.values():
            keys = described["key_metadata"]
            in_list = tuple(key["key_type"] == _IN_LIST for key in keys)
            kind = str(described["value_metadata"]["value_type"])
            entries.append(_Entry(tuple(str(key["key"]) for key in keys), in_list, kind))
    if len({entry.name for entry in entries}) < len(entries) or any(len(each.way) > _DEEPEST for each in entries):
        raise InvalidModelError(f"`{path}` has two places with one name, or is nested too deeply")
    return entries


def _keys(folder: Path) -> dict[str, str]:
    """Arrays that are typed keys of random numbers, and which kind."""
    found: dict[str, str] = {}
    for path in sorted((folder / _ARRAYS).glob("process_*")):
        table = read_json(path)
        with blame_file(f"`{path}` is no table of arrays", *SENSELESS):
            described = [each["array_metadata"] for each in table.get("array_metadatas", ())]
            further = {str(each["param_name"]): each.get("ext_metadata") or {} for each in described}
            found |= {name: str(each[_KIND]) for name, each in further.items() if each.get(_KIND)}
    return found


def read_layout(folder: Path) -> dict[str, Any]:
    """How arrays were spread over devices: the mesh, and the axes of it that axes of arrays follow."""
    layout: dict[str, Any] = {}
    processes = len([*(folder / _ARRAYS).glob("process_*")])
    if processes > 1:
        layout["processes"] = processes
    stored = read_json(folder / _SHARDING) if (folder / _SHARDING).is_file() else {}
    for coded, text in stored.items():
        with blame_file(f"`{folder / _SHARDING}` does not say how arrays are spread", *SENSELESS, RecursionError):
            name, sharding = base64.b64decode(coded, validate=True).decode(), json.loads(text)
            if sharding.get("sharding_type") == "NamedSharding":
                layout["mesh"] = dict(zip(sharding["axis_names"], sharding["shape"], strict=True))
                layout["devices"] = math.prod(map(int, sharding["shape"]))
                layout.setdefault("partition", {})[name] = sharding["partition_spec"]
    return layout


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_tree(tree: Any, folder: Path) -> None:
    """Write a tree into a new folder, an array at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    table: dict[str, Any] = {}
    strings: dict[str, str] = {}
    arrays: dict[str, Tensor] = {}
    keys: list[dict[str, Any]] = []
    for entry, leaf in _describe_tree(tree):
        kind = entry.kind
        if kind == "string":
            strings[entry.name] = leaf
        elif isinstance(leaf, Mapping) and KEY in leaf:
            arrays[entry.name] = leaf[DATA]
            shape, further = list(leaf[DATA].shape), {_KIND: leaf[KEY]}
            described = {"param_name": entry.name, "write_shape": shape, "chunk_shape": shape, "ext_metadata": further}
            keys.append({"array_metadata": described})
        elif kind not in _EMPTY:
            arrays[entry.name] = leaf if isinstance(leaf, Tensor) else ArrayTensor(np.asarray(leaf))
        types = [_IN_LIST if each else _IN_DICT for each in entry.in_list]
        way = [{"key": key, "key_type": type_} for key, type_ in zip(entry.way, types, strict=True)]
        value = {"value_type": kind, "skip_deserialize": kind in _EMPTY}
        table[str(entry.way)] = {"key_metadata": way, "value_metadata": value}
    if len({*strings, *arrays}) < len(strings) + len(arrays):
        raise UnsupportedError("two places of the tree have the same name with dots between their keys")
    write_arrays(folder, arrays.items())
    settings = {"use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    write_json(folder / TREE, {"tree_metadata": table, **settings, "custom_metadata": None})
    if strings:
        write_json(folder / _STRINGS, strings)
    if keys:
        (folder / _ARRAYS).mkdir()
        write_json(folder / _ARRAYS / "process_0", {"array_metadatas": keys})


def _describe_tree(tree: Any, way: Way = (), in_list: tuple[bool, ...] = ()) -> Iterator[tuple[_Entry, Any]]:
    is_key = isinstance(tree, Mapping) and KEY in tree
    if is_key or not parts(tree):
        yield _Entry(way, in_list, _ARRAY if is_key else _kind(tree)), tree
        return
    for key, part in parts(tree):
        yield from _describe_tree(part, (*way, key), (*in_list, not isinstance(tree, Mapping)))


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return _ARRAY
    if leaf is None or isinstance(leaf, Mapping | list | tuple):
        return "None" if leaf is None else "Dict" if isinstance(leaf, Mapping) else "List"
    if isinstance(leaf, str | int | float | np.generic):
        return "string" if isinstance(leaf, str) else "scalar"
    raise UnsupportedError(f"Orbax has no place for {leaf!r} in a tree", hint="leave it out of the tree")


# ---- arrays ----------------------------------------------------------------------------------------------------------

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
