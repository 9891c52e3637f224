"""`.safetensors`, alone or in several files with an index, as Hugging Face writes models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onward.errors import InvalidModelError, UnsupportedError
from onward.model.storage.containers import SAFETENSORS_TYPES, safetensors_head, safetensors_header
from onward.model.storage.files import blame_file, is_plain_name, regular
from onward.run_state.tensors import StoredTensor, Tensor, contiguous_strides

INDEX = "model.safetensors.index.json"
MODEL = "model.safetensors"
_KINDS = {np.dtype(kind): name for name, kind in SAFETENSORS_TYPES.items()}


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file."""
    with blame_file(f"`{path}` is not a whole .safetensors file"):
        size = regular(path).st_size
        with open(path, "rb") as file:
            found = safetensors_header(lambda at, count: file.read(count), size)  # which asks for one after the other
    return {
        name: StoredTensor(path, stored.offset, stored.dtype, stored.shape, contiguous_strides(stored.shape))
        for name, stored in found.items()
    }


def read_model_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model, in one file or in those that an index names."""
    if not (folder / INDEX).exists():
        return read_safetensors(folder / MODEL)
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict):
        raise InvalidModelError(f"`{folder / INDEX}` does not say where tensors are")
    if outside := [name for name in places.values() if not is_plain_name(name)]:
        raise InvalidModelError(f"`{folder / INDEX}` leads out of its folder, to `{outside[0]}`")
    files = {name: read_safetensors(folder / name) for name in sorted(set(places.values()))}
    if missing := [tensor for tensor, name in places.items() if tensor not in files[name]]:
        raise InvalidModelError(f"`{places[missing[0]]}` has no `{missing[0]}`, where the index says it is")
    return {tensor: files[name][tensor] for tensor, name in places.items()}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors one after the other, the widest types first, so that each is aligned to its own."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    order = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    end = 0
    for name, tensor in order:
        kind = _KINDS.get(tensor.dtype)
        if kind is None:
            raise UnsupportedError(f"`{name}` is {tensor.dtype}, of which .safetensors has none")
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    with open(path, "wb") as file:
        file.write(safetensors_head(header))
        for _, tensor in order:
            tensor.write_to(file)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """An object in a file of JSON."""
    with blame_file(f"cannot read `{path}`", OSError, ValueError, RecursionError):
        regular(path)
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise InvalidModelError(f"`{path}` holds no object")
    return found
