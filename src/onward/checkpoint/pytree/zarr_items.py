"""A tree as Orbax stores it in a folder: a table of the places of a tree, arrays in zarr, and texts."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onward.checkpoint.pytree.pytrees import DATA, KEY, Way, nest, parts, with_lists
from onward.checkpoint.pytree.zarr_store import read_arrays, write_arrays
from onward.checkpoint.safetensors_files import read_json, write_json
from onward.errors import InvalidModelError, UnsupportedError
from onward.model.storage.files import SENSELESS, blame_file
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


# ---- reading ---------------------------------------------------------------------------------------------------------


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
    with blame_file(f"`{path}` is not the table of a tree", *SENSELESS):
        entries = [_entry(each) for each in table.values()]
    if len({entry.name for entry in entries}) < len(entries) or any(len(each.way) > _DEEPEST for each in entries):
        raise InvalidModelError(f"`{path}` has two places with one name, or is nested too deeply")
    return entries


def _entry(described: Mapping[str, Any]) -> _Entry:
    keys = described["key_metadata"]
    way = tuple(str(key["key"]) for key in keys)
    return _Entry(
        way, tuple(key["key_type"] == _IN_LIST for key in keys), str(described["value_metadata"]["value_type"])
    )


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
            keys.append(_key_metadata(entry.name, leaf))
        elif kind not in _EMPTY:
            arrays[entry.name] = leaf if isinstance(leaf, Tensor) else ArrayTensor(np.asarray(leaf))
        table[str(entry.way)] = _table_entry(entry)
    if len({*strings, *arrays}) < len(strings) + len(arrays):
        raise UnsupportedError("two places of the tree have the same name with dots between their keys")
    write_arrays(folder, arrays.items())
    described = {"tree_metadata": table, "use_ocdbt": True, "use_zarr3": False,
                 "store_array_data_equal_to_fill_value": True, "custom_metadata": None}  # fmt: skip
    write_json(folder / TREE, described)
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


def _table_entry(entry: _Entry) -> dict[str, Any]:
    types = [_IN_LIST if each else _IN_DICT for each in entry.in_list]
    keys = [{"key": key, "key_type": kind} for key, kind in zip(entry.way, types, strict=True)]
    value = {"value_type": entry.kind, "skip_deserialize": entry.kind in _EMPTY}
    return {"key_metadata": keys, "value_metadata": value}


def _key_metadata(name: str, key: Mapping[str, Any]) -> dict[str, Any]:
    shape = list(key[DATA].shape)
    kind = {_KIND: key[KEY]}
    return {"array_metadata": {"param_name": name, "write_shape": shape, "chunk_shape": shape, "ext_metadata": kind}}
