"""Distributed checkpoints of PyTorch (FSDP): a table of pieces, and files with the pieces."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.pytorch.archive import TYPES, Appending, read_torch_file, type_name, write_torch_archive
from onward.checkpoint.pytorch.contents import checkpoint_of, has, progress_of
from onward.checkpoint.pytorch.pickle_objects import Name, Object, write_pickle
from onward.checkpoint.pytorch.pickle_reader import read_pickle
from onward.checkpoint.pytorch.state_dicts import module_state, optimizer_state, up_to_date
from onward.checkpoint.pytree import nest
from onward.errors import UnsupportedError
from onward.model.storage.files import SENSELESS, blame_file, is_plain_name, regular
from onward.run_state.tensors import ScatteredTensor, Tensor

METADATA = ".metadata"


def read(folder: Path) -> Checkpoint:
    tree = {key: _with_state(value) for key, value in read_tree(folder).items()}
    return checkpoint_of(folder, FORMAT.name, FORMAT.title, {METADATA: tree}, progress=progress_of(tree))


def _with_state(tree: Any) -> Any:
    """Add a missing `state` to an optimizer: tables of pieces list no empty dicts."""
    is_bare = isinstance(tree, dict) and "param_groups" in tree and "state" not in tree
    return {"state": {}, **tree} if is_bare else tree


def read_tree(folder: Path) -> dict[str, Any]:
    """Return the saved tree, with tensors as locations of their pieces."""
    path = folder / METADATA
    with blame_file(f"cannot read `{path}`", OSError):
        regular(path)
        table = read_pickle(path.read_bytes(), str(path))
    with blame_file(f"`{path}` is not the table of a distributed checkpoint", *SENSELESS):
        key_paths = table.state.get("planner_data") or {}
        root = nest(
            (key_path if isinstance(key_path := key_paths.get(name), tuple) and key_path else (name,), value)
            for name, value in _contents(folder, table).items()
        )
        return {key: _with_lists(value) for key, value in root.items()}


def _contents(folder: Path, table: Object) -> dict[str, Any]:
    pieces: dict[str, list[tuple[tuple[int, ...] | None, partial[Any]]]] = {}
    for index, stored in table.state["storage_data"].items():
        key, location = index.state, stored.state
        file = location["relative_path"]
        if not is_plain_name(file):
            raise ValueError(f"it leads out of its folder, to `{file}`")
        begin = _sizes(key["offset"]) if key.get("offset") is not None else None
        find = partial(read_torch_file, folder / file, (location["offset"], location["length"]))
        pieces.setdefault(key["fqn"], []).append((begin, find))
    metadata: Mapping[str, Object] = table.state["state_dict_metadata"]
    return {
        name: _tensor(info, pieces[name]) if info.of.name == "TensorStorageMetadata" else pieces[name][0][1]()
        for name, info in metadata.items()
        if name in pieces
    }


def _tensor(metadata: Object, pieces: list[tuple[tuple[int, ...] | None, partial[Any]]]) -> ScatteredTensor:
    properties, shape = metadata.state["properties"].state, _sizes(metadata.state["size"])
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    if not isinstance(dtype, Name) or dtype.name not in TYPES:
        raise ValueError(f"`{dtype}` is not a known dtype")
    origin = (0,) * len(shape)
    return ScatteredTensor(np.dtype(TYPES[dtype.name]), shape, tuple((begin or origin, find) for begin, find in pieces))


def _sizes(sizes: Any) -> tuple[int, ...]:
    shape = tuple(sizes.arguments[0] if isinstance(sizes, Object) else sizes)
    if not all(type(size) is int and 0 <= size < 2**62 for size in shape):
        raise ValueError("a tensor has an invalid shape")
    return shape


def _with_lists(tree: Any) -> Any:
    """Return a tree in which dicts with the keys 0, 1, 2 ... are lists."""
    if not isinstance(tree, dict):
        return tree
    children = {key: _with_lists(value) for key, value in tree.items()}
    return list(children.values()) if children and list(children) == list(range(len(children))) else children


_FILE = "__0_0.distcp"
_MOST_OTHERS = 20_000
"""Largest number of other values: each takes 0.5 ms, and 100 KB can name 200,000."""
_MODULE = "torch.distributed.checkpoint.metadata"


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the original tree with current numbers, or a new one."""
    if checkpoint.format == FORMAT.name and METADATA in checkpoint.trees:
        tree = up_to_date(checkpoint.trees, checkpoint)[METADATA]
    else:
        optimizers = [optimizer_state(optimizer, by_name=True) for optimizer in checkpoint.optimizers]
        tree = {
            "model": dict(module_state(checkpoint)),
            **({"optim": optimizers[0] if len(optimizers) == 1 else optimizers} if optimizers else {}),
            **({"scheduler": dict(checkpoint.schedules[0].state)} if checkpoint.schedules else {}),
            **dict(checkpoint.progress),
        }
    write_values(_leaves(tree), folder)


def write_values(values: Iterable[tuple[tuple[Any, ...], Any]], folder: Path) -> None:
    """Write values with their key paths into one file, and the table of their locations."""
    metadata: dict[str, Object] = {}
    key_paths: dict[str, tuple[Any, ...]] = {}
    locations: dict[Object, Object] = {}
    others = 0
    with open(folder / _FILE, "wb") as file:
        for key_path, value in values:
            is_tensor = isinstance(value, Tensor)
            others += not is_tensor
            if others > _MOST_OTHERS:
                raise UnsupportedError(
                    f"the checkpoint has more than {_MOST_OTHERS:,} values that are not tensors",
                    hint="write it with `--to torch`",
                )
            name = ".".join(map(str, key_path))
            member = Appending(file)
            write_torch_archive(member, value)
            file.seek(0, io.SEEK_END)
            key_paths[name] = key_path
            metadata[name] = _tensor_metadata(value) if is_tensor else _instance("BytesStorageMetadata", {})
            index: dict[str, Any] = {"fqn": name, "index": 0 if is_tensor else None}
            if is_tensor:
                index["offset"] = _size((0,) * len(value.shape))
            location = {"relative_path": _FILE, "offset": member.start, "length": file.tell() - member.start}
            info = _instance("_StorageInfo", location, "torch.distributed.checkpoint.filesystem")
            locations[_instance("MetadataIndex", index)] = info
    storage_meta = _instance("StorageMeta", {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []})
    table = {
        "state_dict_metadata": metadata,
        "planner_data": key_paths,
        "storage_data": locations,
        "storage_meta": storage_meta,
        "version": "1.0.0",
    }
    (folder / METADATA).write_bytes(write_pickle(_instance("Metadata", table)))


def _leaves(tree: Any, key_path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Return values with their key paths. As in PyTorch, a list of plain values is one value."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*key_path, key))
    elif isinstance(tree, list) and not _is_one_value(tree):
        for at, value in enumerate(tree):
            yield from _leaves(value, (*key_path, at))
    else:
        yield key_path, tree


def _is_one_value(items: list[Any]) -> bool:
    return not any(
        isinstance(item, Mapping | Tensor) or (isinstance(item, list) and not _is_one_value(item)) for item in items
    )


def _instance(name: str, state: Any, module: str = _MODULE) -> Object:
    return Object(Name(module, name), is_instance=True, state=state)


def _tensor_metadata(tensor: Tensor) -> Object:
    layout = Object(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    memory = Object(Name(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    properties = (Name("torch", type_name(tensor.dtype)), layout, False, memory, False)
    size = _size(tensor.shape)
    chunk = _instance("ChunkStorageMetadata", {"offsets": _size((0,) * len(tensor.shape)), "sizes": size})
    state = {"properties": _instance("TensorProperties", properties), "size": size, "chunks": [chunk]}
    return _instance("TensorStorageMetadata", state)


def _size(shape: tuple[int, ...]) -> Object:
    return Object(Name("torch", "Size"), (shape,))


FORMAT = Format("dcp", "PyTorch, distributed", has(METADATA), read, write, also=("fsdp",))
