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
PYTORCH = {"format": "pt"}
"""Metadata with which transformers loads a file."""
_KINDS = {np.dtype(dtype): name for name, dtype in SAFETENSORS_TYPES.items()}


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    with blame_file(f"`{path}` is not a whole .safetensors file"):
        size = regular(path).st_size
        with open(path, "rb") as file:
            header = safetensors_header(lambda at, count: file.read(count), size)  # which asks for one after the other
    return {
        name: StoredTensor(path, stored.offset, stored.dtype, stored.shape, contiguous_strides(stored.shape))
        for name, stored in header.items()
    }


def read_model_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a model, from one file or from those that an index names."""
    if not (folder / INDEX).exists():
        return read_safetensors(folder / MODEL)
    files_of = read_json(folder / INDEX).get("weight_map")
    if not isinstance(files_of, dict):
        raise InvalidModelError(f"`{folder / INDEX}` has no `weight_map`")
    if outside := [name for name in files_of.values() if not is_plain_name(name)]:
        raise InvalidModelError(f"`{folder / INDEX}` leads out of its folder, to `{outside[0]}`")
    files = {name: read_safetensors(folder / name) for name in sorted(set(files_of.values()))}
    if missing := [tensor for tensor, name in files_of.items() if tensor not in files[name]]:
        raise InvalidModelError(f"`{files_of[missing[0]]}` has no `{missing[0]}`, where the index says it is")
    return {tensor: files[name][tensor] for tensor, name in files_of.items()}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors, the widest types first, so that each is aligned to its own."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    order = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    end = 0
    for name, tensor in order:
        type_name = _KINDS.get(tensor.dtype)
        if type_name is None:
            raise UnsupportedError(f"`{name}` is {tensor.dtype}, of which .safetensors has none")
        header[name] = {"dtype": type_name, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    with open(path, "wb") as file:
        file.write(safetensors_head(header))
        for _, tensor in order:
            tensor.write_to(file)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    with blame_file(f"cannot read `{path}`", OSError, ValueError, RecursionError):
        regular(path)
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise InvalidModelError(f"`{path}` is not a JSON object")
    return content
