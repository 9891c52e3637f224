"""PyTorch's distributed checkpoints, which FSDP and many others write: a table of pieces, and files that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onward.checkpoint.archive import TYPES, read_torch_file
from onward.checkpoint.description import Checkpoint
from onward.checkpoint.folders import has
from onward.checkpoint.format import Format
from onward.checkpoint.objects import Name, Object
from onward.checkpoint.pickles import read_pickle
from onward.checkpoint.tensors import ScatteredTensor
from onward.checkpoint.trees import checkpoint_of, progress_of
from onward.errors import InvalidModelError
from onward.model.storage.files import reason, regular

METADATA = ".metadata"


def read(folder: Path) -> Checkpoint:
    tree = read_tree(folder)
    return checkpoint_of(folder, FORMAT.name, FORMAT.title, {METADATA: tree}, progress=progress_of(tree))


def read_tree(folder: Path) -> dict[str, Any]:
    """The tree that was saved, with tensors as the places of their pieces."""
    path = folder / METADATA
    try:
        regular(path)
        table = read_pickle(path.read_bytes(), str(path))
    except OSError as error:
        raise InvalidModelError(f"cannot read `{path}`: {reason(error)}") from error
    try:
        return _nested(_contents(folder, table), table.state.get("planner_data") or {})
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise InvalidModelError(f"`{path}` is not the table of a distributed checkpoint: {error}") from error


def _contents(folder: Path, table: Object) -> dict[str, Any]:
    places: dict[str, list[tuple[tuple[int, ...] | None, partial[Any]]]] = {}
    for index, where in table.state["storage_data"].items():
        key, place = index.state, where.state
        file = place["relative_path"]
        if Path(file).name != file:
            raise ValueError(f"it leads out of its folder, to `{file}`")
        begin = _sizes(key["offset"]) if key.get("offset") is not None else None
        find = partial(read_torch_file, folder / file, (place["offset"], place["length"]))
        places.setdefault(key["fqn"], []).append((begin, find))
    kinds: Mapping[str, Object] = table.state["state_dict_metadata"]
    return {
        name: _tensor(kind, places[name]) if _is_tensor(kind) else places[name][0][1]()
        for name, kind in kinds.items()
        if name in places
    }


def _is_tensor(kind: Object) -> bool:
    return kind.of.name == "TensorStorageMetadata"


def _tensor(kind: Object, pieces: list[tuple[tuple[int, ...] | None, partial[Any]]]) -> ScatteredTensor:
    dtype, shape = _type(kind.state["properties"]), _sizes(kind.state["size"])
    origin = (0,) * len(shape)
    return ScatteredTensor(dtype, shape, tuple((begin or origin, find) for begin, find in pieces))


def _type(properties: Object) -> np.dtype:
    """The type of numbers, which is the first of some properties."""
    state = properties.state
    found = state[0] if isinstance(state, tuple) else state["dtype"]
    if not isinstance(found, Name) or found.name not in TYPES:
        raise ValueError(f"`{found}` is no type of numbers that is known")
    return np.dtype(TYPES[found.name])


def _sizes(sizes: Any) -> tuple[int, ...]:
    found = tuple(sizes.arguments[0] if isinstance(sizes, Object) else sizes)
    if not all(type(size) is int and 0 <= size < 2**62 for size in found):
        raise ValueError("a tensor has no shape that there could be")
    return found


def _nested(values: Mapping[str, Any], ways: Mapping[str, Any]) -> dict[str, Any]:
    """Values by their whole names as the tree that they were: each has the way to it, by keys and places in lists."""
    root: dict[Any, Any] = {}
    for name, value in values.items():
        way = ways.get(name)
        *outer, last = way if isinstance(way, tuple) and way else (name,)
        around = root
        for key in outer:
            around = around.setdefault(key, {})
        around[last] = value
    return {key: _with_lists(value) for key, value in root.items()}


def _with_lists(tree: Any) -> Any:
    """What has the keys 0, 1, 2 ... was a list."""
    if not isinstance(tree, dict):
        return tree
    inside = {key: _with_lists(value) for key, value in tree.items()}
    return list(inside.values()) if inside and list(inside) == list(range(len(inside))) else inside


FORMAT = Format("dcp", "PyTorch, distributed", has(METADATA), read)
