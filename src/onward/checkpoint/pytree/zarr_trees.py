"""A tree as Orbax stores it in a folder: a table of paths, arrays in zarr, and strings.

tensorstore reads and writes the arrays, in a database of OCDBT or each in its own folder.
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

from onward.checkpoint.pytree import DATA, KEY, KeyPath, nest, parts, with_lists
from onward.checkpoint.safetensors_files import read_json, write_json
from onward.errors import ExternalDataError, InvalidModelError, UnsupportedError
from onward.model.storage.files import SENSELESS, advance, blame_file, reason, regular
from onward.run_state.tensors import ArrayTensor, Tensor

TREE = "_METADATA"
_STRINGS, _SHARDING, _ARRAYS = "_strings.json", "_sharding", "array_metadatas"
_GENERATOR = "random_key_impl"
_IN_LIST, _IN_DICT = 1, 2
_ARRAY = "np.ndarray"
"""Type of arrays, which JAX restores on its devices."""
_EMPTY: dict[str, Any] = {"None": None, "NamedTuple": None, "Dict": {}, "List": [], "Tuple": []}
_DEEPEST = 100


class _Entry(NamedTuple):
    path: KeyPath
    in_list: tuple[bool, ...]
    leaf_type: str

    @property
    def name(self) -> str:
        """Name of the array."""
        return ".".join(self.path)


def read_tree(folder: Path) -> Any:
    """Return the tree of a folder, with arrays as locations."""
    table = read_json(folder / TREE)
    entries = _entries(folder / TREE, table.get("tree_metadata"))
    strings = read_json(folder / _STRINGS) if (folder / _STRINGS).is_file() else {}
    stored = [entry.name for entry in entries if entry.leaf_type not in _EMPTY and entry.leaf_type != "string"]
    ocdbt, version3 = table.get("use_ocdbt", (folder / "manifest.ocdbt").exists()), table.get("use_zarr3", False)
    arrays = read_arrays(folder, stored, ocdbt=bool(ocdbt), version3=bool(version3))
    keys = _random_keys(folder)
    leaves: dict[KeyPath, Any] = {}
    for entry in entries:
        if entry.leaf_type in _EMPTY:
            leaf = _EMPTY[entry.leaf_type]
        elif entry.leaf_type == "string":
            leaf = strings.get(entry.name)
        elif entry.name in keys:
            leaf = {KEY: keys[entry.name], DATA: arrays[entry.name]}
        else:
            array = arrays[entry.name]
            leaf = array.array()[()] if entry.leaf_type == "scalar" and not array.shape else array
        leaves[entry.path] = leaf
    if [*leaves] == [()]:
        return leaves[()]
    lists = {entry.path[:depth] for entry in entries for depth, is_list in enumerate(entry.in_list) if is_list}
    with blame_file(f"`{folder / TREE}` is not a valid table of a tree"):
        return with_lists(nest(leaves.items()), lists)


def _entries(path: Path, table: Any) -> list[_Entry]:
    entries = []
    with blame_file(f"`{path}` is not the table of a tree", *SENSELESS):
        for described in table.values():
            keys = described["key_metadata"]
            in_list = tuple(key["key_type"] == _IN_LIST for key in keys)
            leaf_type = str(described["value_metadata"]["value_type"])
            entries.append(_Entry(tuple(str(key["key"]) for key in keys), in_list, leaf_type))
    if len({entry.name for entry in entries}) < len(entries) or any(len(item.path) > _DEEPEST for item in entries):
        raise InvalidModelError(f"`{path}` repeats a name, or is nested too deeply")
    return entries


def _random_keys(folder: Path) -> dict[str, str]:
    """Return the arrays that are typed random keys -> their generators."""
    generators: dict[str, str] = {}
    for path in sorted((folder / _ARRAYS).glob("process_*")):
        table = read_json(path)
        with blame_file(f"`{path}` is not a table of arrays", *SENSELESS):
            described = [item["array_metadata"] for item in table.get("array_metadatas", ())]
            further = {str(item["param_name"]): (item.get("ext_metadata") or {}).get(_GENERATOR) for item in described}
            generators |= {name: str(generator) for name, generator in further.items() if generator}
    return generators


def read_layout(folder: Path) -> dict[str, Any]:
    """Return the sharding of arrays: the mesh, and the mesh axes of their axes."""
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
    """Write a tree into a new folder, one array at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    table: dict[str, Any] = {}
    strings: dict[str, str] = {}
    arrays: dict[str, Tensor] = {}
    keys: list[dict[str, Any]] = []
    for entry, leaf in _describe_tree(tree):
        leaf_type = entry.leaf_type
        if leaf_type == "string":
            strings[entry.name] = leaf
        elif isinstance(leaf, Mapping) and KEY in leaf:
            arrays[entry.name] = leaf[DATA]
            shape, further = list(leaf[DATA].shape), {_GENERATOR: leaf[KEY]}
            described = {"param_name": entry.name, "write_shape": shape, "chunk_shape": shape, "ext_metadata": further}
            keys.append({"array_metadata": described})
        elif leaf_type not in _EMPTY:
            arrays[entry.name] = leaf if isinstance(leaf, Tensor) else ArrayTensor(np.asarray(leaf))
        types = [_IN_LIST if is_list else _IN_DICT for is_list in entry.in_list]
        key_metadata = [{"key": key, "key_type": type_} for key, type_ in zip(entry.path, types, strict=True)]
        value = {"value_type": leaf_type, "skip_deserialize": leaf_type in _EMPTY}
        table[str(entry.path)] = {"key_metadata": key_metadata, "value_metadata": value}
    if len({*strings, *arrays}) < len(strings) + len(arrays):
        raise UnsupportedError("two paths of the tree are equal when joined with dots")
    write_arrays(folder, arrays.items())
    settings = {"use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    write_json(folder / TREE, {"tree_metadata": table, **settings, "custom_metadata": None})
    if strings:
        write_json(folder / _STRINGS, strings)
    if keys:
        (folder / _ARRAYS).mkdir()
        write_json(folder / _ARRAYS / "process_0", {"array_metadatas": keys})


def _describe_tree(tree: Any, path: KeyPath = (), in_list: tuple[bool, ...] = ()) -> Iterator[tuple[_Entry, Any]]:
    is_key = isinstance(tree, Mapping) and KEY in tree
    if is_key or not parts(tree):
        yield _Entry(path, in_list, _ARRAY if is_key else _leaf_type(tree)), tree
        return
    for key, child in parts(tree):
        yield from _describe_tree(child, (*path, key), (*in_list, not isinstance(tree, Mapping)))


def _leaf_type(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return _ARRAY
    if leaf is None or isinstance(leaf, Mapping | list | tuple):
        return "None" if leaf is None else "Dict" if isinstance(leaf, Mapping) else "List"
    if isinstance(leaf, str | int | float | np.generic):
        return "string" if isinstance(leaf, str) else "scalar"
    raise UnsupportedError(f"Orbax cannot store {leaf!r} in a tree", hint="leave it out of the tree")


# ---- arrays ----------------------------------------------------------------------------------------------------------

_CHUNK = 32 << 20
"""Bytes of a chunk; a chunk has at least one row."""
_BATCH = 64 << 20
"""Bytes of a transaction."""
_CACHE = {"cache_pool": {"total_bytes_limit": 32 << 20}}
_FREE, _DENSEST = 1 << 30, 1024
"""Largest array in bytes, or as a multiple of all files: only zeros are packed more densely."""


def tensorstore() -> Any:
    try:
        return importlib.import_module("tensorstore")
    except ImportError as error:
        raise UnsupportedError(
            "checkpoints of Orbax need tensorstore, which is not installed", hint="pip install onward[orbax]"
        ) from error


@dataclass(frozen=True, eq=False)
class ZarrTensor(Tensor):
    """Array in chunks."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    store: Any = field(repr=False)

    def array(self) -> np.ndarray:
        return self._read(self.store)

    def write_to(self, file: BinaryIO) -> None:
        """Write as many rows at a time as a chunk has."""
        rows = (self.store.chunk_layout.read_chunk.shape or (1,))[0]
        if not self.shape or not rows:
            super().write_to(file)
            return
        for begin in range(0, self.shape[0], rows):
            block = np.ascontiguousarray(self.rows(begin, begin + rows)).reshape(-1).view(np.uint8)
            file.write(block.data)
            advance(block.nbytes)

    def rows(self, begin: int, end: int) -> np.ndarray:
        """Return some rows. Others are not read."""
        return self._read(self.store[begin : min(end, self.shape[0])])

    def _read(self, store: Any) -> np.ndarray:
        try:
            return np.asarray(store.read().result())
        except ValueError as error:
            problem = f"`{self.name}` cannot be read: {_first(error)}"
            raise ExternalDataError(problem, hint="open an earlier checkpoint") from error


def read_arrays(folder: Path, names: Iterable[str], *, ocdbt: bool, version3: bool) -> dict[str, ZarrTensor]:
    """Open arrays by name. Only their shapes are read."""
    ts, location = tensorstore(), folder.resolve()
    try:  # tensorstore would wait for a named pipe forever
        size = sum(regular(path).st_size for path in location.rglob("*") if not path.is_dir())
    except OSError as error:
        raise InvalidModelError(f"`{folder}` is not a whole folder of arrays: {reason(error)}") from None
    context = ts.Context(_CACHE)
    driver = "zarr3" if version3 else "zarr"
    pending = {}
    for name in names:
        spec = {"driver": driver, "kvstore": _kvstore(location, name, ocdbt)}
        pending[name] = ts.open(spec, open=True, read=True, context=context)
    most = max(_FREE, _DENSEST * size)
    tensors = {}
    for name, future in pending.items():
        try:
            store = future.result()
            tensor = ZarrTensor(name, np.dtype(store.dtype.numpy_dtype), tuple(map(int, store.shape)), store)
        except (ValueError, TypeError) as error:
            raise InvalidModelError(f"`{folder}` has no complete array `{name}`: {_first(error)}") from error
        if tensor.nbytes > most:
            raise InvalidModelError(f"`{name}` of `{folder}` would be {tensor.nbytes:,} bytes, far more than its files")
        tensors[name] = tensor
    return tensors


def _kvstore(folder: Path, name: str, ocdbt: bool) -> dict[str, Any]:
    if ocdbt:
        base = {"driver": "file", "path": f"{folder}/"}
        return {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    if any(component in ("", ".", "..") for component in name.split("/")) or "\\" in name:
        raise InvalidModelError(f"`{folder}` leads out of itself, to `{name}`")
    return {"driver": "file", "path": f"{folder}/{name}/"}


def _first(error: BaseException) -> str:
    """Return the message of tensorstore without the request."""
    return str(error).partition(" [")[0][:300]


def write_arrays(folder: Path, arrays: Iterable[tuple[str, Tensor]]) -> None:
    """Write arrays into a database, in batches."""
    ts, location = tensorstore(), folder.resolve()
    context = ts.Context(_CACHE)
    batch, size = ts.Transaction(), 0
    for name, tensor in arrays:
        rows = _rows(tensor)
        chunk = (rows, *tensor.shape[1:]) if tensor.shape else ()
        store = ts.open(
            {"driver": "zarr", "kvstore": _kvstore(location, name, ocdbt=True), "metadata": {"compressor": None}},
            create=True, dtype=ts.dtype(tensor.dtype), shape=tensor.shape, context=context, transaction=batch,
            chunk_layout=ts.ChunkLayout(chunk_shape=[max(length, 1) for length in chunk]),
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
    """Return the rows of a chunk."""
    row = tensor.dtype.itemsize * math.prod(tensor.shape[1:])
    return min(max(1, _CHUNK // max(row, 1)), tensor.shape[0]) if tensor.shape else 1


def _blocks(tensor: Tensor, rows: int) -> Iterator[tuple[int, int, np.ndarray]]:
    if not tensor.shape:
        yield 0, 1, tensor.array()
        return
    rows_between = tensor.rows if isinstance(tensor, ZarrTensor) else partial(_rows_of_array, tensor.array())
    for begin in range(0, tensor.shape[0], rows):
        end = min(begin + rows, tensor.shape[0])
        block = rows_between(begin, end)
        yield begin, end, block
        advance(block.nbytes)


def _rows_of_array(elements: np.ndarray, begin: int, end: int) -> np.ndarray:
    return elements[begin:end]
