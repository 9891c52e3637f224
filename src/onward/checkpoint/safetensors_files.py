"""`.safetensors`, alone or in several files with an index, as Hugging Face writes models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onward.checkpoint.tensors import StoredTensor, contiguous
from onward.errors import InvalidModelError
from onward.model.storage.files import reason, regular
from onward.model.storage.headers import LONGEST, safetensors_header

INDEX = "model.safetensors.index.json"


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file."""
    try:
        size = regular(path).st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, LONGEST):
                raise ValueError("its header would end beyond the file")
            found = safetensors_header(file.read(length), 8 + length, size)
    except (OSError, ValueError) as error:
        raise InvalidModelError(f"`{path}` is not a whole .safetensors file: {reason(error)}") from error
    return {
        name: StoredTensor(path, stored.offset, stored.dtype, stored.shape, contiguous(stored.shape))
        for name, stored in found.items()
    }


def read_model_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model, in one file or in those that an index names."""
    if not (folder / INDEX).exists():
        return read_safetensors(folder / "model.safetensors")
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise InvalidModelError(f"`{folder / INDEX}` does not say where tensors are")
    if outside := [name for name in places.values() if Path(name).name != name]:
        raise InvalidModelError(f"`{folder / INDEX}` leads out of its folder, to `{outside[0]}`")
    files = {name: read_safetensors(folder / name) for name in sorted(set(places.values()))}
    if missing := [tensor for tensor, name in places.items() if tensor not in files[name]]:
        raise InvalidModelError(f"`{places[missing[0]]}` has no `{missing[0]}`, where the index says it is")
    return {tensor: files[name][tensor] for tensor, name in places.items()}


def read_json(path: Path) -> dict[str, Any]:
    """An object in a file of JSON."""
    try:
        regular(path)
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidModelError(f"cannot read `{path}`: {reason(error)}") from error
    if not isinstance(found, dict):
        raise InvalidModelError(f"`{path}` holds no object")
    return found
