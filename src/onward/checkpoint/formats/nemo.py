"""`.nemo` files of NVIDIA NeMo: a tar file with a configuration, weights, and what else a model needs."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.pytorch.archive import Appending, read_torch_file, write_torch_archive
from onward.checkpoint.pytorch.states import module_state
from onward.checkpoint.pytorch.trees import executed_names, mapping
from onward.configuration import parse_yaml, write_yaml
from onward.errors import Error, InvalidModelError, UnsupportedError, list_names
from onward.model.storage.files import blame_file, regular
from onward.run_state.tensors import StoredTensor, Tensor

_CONFIGURATION, _WEIGHTS = "model_config.yaml", "model_weights.ckpt"
_MOST = 10_000
"""Files in one."""
_MAGIC, _AT = b"ustar", 257
_COMPRESSED = b"\x1f\x8b"
_ENDING = ".nemo"
_BLOCK = tarfile.BLOCKSIZE


def matches(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        begin = file.read(_AT + len(_MAGIC))
    if begin[_AT:] != _MAGIC:
        return path.suffix == _ENDING and begin.startswith(_COMPRESSED)
    try:
        is_model = _CONFIGURATION in _members(path)
    except Error:
        is_model = False
    return is_model or path.suffix == _ENDING  # whoever reads it says what is wrong


def _members(path: Path) -> dict[str, tarfile.TarInfo]:
    """The files of a tar file, by name."""
    found: dict[str, tarfile.TarInfo] = {}
    with blame_file(f"`{path}` is not a whole tar file", tarfile.TarError, OSError, ValueError, EOFError):
        regular(path)
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if len(found) > _MOST:
                    raise ValueError("it holds more files than any model")
                if member.isreg() and not member.issparse():
                    found[member.name.removeprefix("./")] = member
    return found


def read(path: Path) -> Checkpoint:
    with open(path, "rb") as file:
        if file.read(2) == _COMPRESSED:
            raise UnsupportedError(
                f"`{path}` is compressed, and its tensors have no place in the file",
                hint=f"unpack it: `gunzip -S {_ENDING} -c {path.name} > plain{_ENDING}`",
            )
        members = _members(path)
        if _WEIGHTS not in members:
            spread = any(name.startswith("model_weights/") for name in members)
            raise UnsupportedError(
                f"`{path}` has no `{_WEIGHTS}`" + (", but weights of several processes" if spread else ""),
                hint="unpack it with `tar -xf`, and give its `model_weights`" if spread else "give a whole model",
            )
        if (config := members.get(_CONFIGURATION)) is None:
            raise InvalidModelError(f"`{path}` has no `{_CONFIGURATION}`", hint="give a whole model")
        file.seek(config.offset_data)
        configuration = parse_yaml(file.read(min(config.size, 1 << 25)), f"{path.name}:{_CONFIGURATION}")
    weights = members[_WEIGHTS]
    tree = mapping(read_torch_file(path, (weights.offset_data, weights.size)))
    version = configuration.get("nemo_version")
    return Checkpoint(
        path=path,
        format=FORMAT.name,
        title=f"{FORMAT.title} {version}" if version else FORMAT.title,
        tensors={str(name): tensor for name, tensor in tree.items() if isinstance(tensor, Tensor)},
        keeps_order=True,
        configuration=configuration,
        arguments=mapping(configuration.get("optim")),
        files=tuple(sorted({*members} - {_CONFIGURATION, _WEIGHTS})),
        trees={_CONFIGURATION: configuration},
        executes=executed_names(tree),
        remarks=("it holds a model, and no run: NeMo keeps those in checkpoints of Lightning",),
    )


# ---- writing ---------------------------------------------------------------------------------------------------------


def write(checkpoint: Checkpoint, path: Path) -> None:
    """The model alone, with the configuration that it came with, by which NeMo knows what it is."""
    if checkpoint.format != FORMAT.name or not checkpoint.configuration:
        raise UnsupportedError(
            "a `.nemo` file says by its configuration which class of NeMo it is of, and there is none",
            hint="write weights into a model that NeMo has made: begin with its `.nemo` file",
        )
    others = _others(checkpoint)
    with open(path, "wb") as file:
        _add(file, _CONFIGURATION, write_yaml(checkpoint.configuration).encode())
        _add_weights(file, checkpoint)
        for name, other in others.items():
            file.write(_header(name, other.nbytes))
            other.write_to(file)
            _fill(file)
        file.write(bytes(2 * _BLOCK))


def _others(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """The other files of the model, where they lie."""
    if not checkpoint.files:
        return {}
    members = _members(checkpoint.path) if checkpoint.path.is_file() else {}
    if missing := [name for name in checkpoint.files if name not in members]:
        raise UnsupportedError(
            f"`{checkpoint.path}` is not there any more, and had {list_names(missing, 3)}, which belong to the model",
            hint="put it where it was",
        )
    byte = np.dtype(np.uint8)
    kept = {name: members[name] for name in checkpoint.files}
    return {n: StoredTensor(checkpoint.path, m.offset_data, byte, (m.size,), (1,)) for n, m in kept.items()}


def _add(file: BinaryIO, name: str, data: bytes) -> None:
    file.write(_header(name, len(data)) + data)
    _fill(file)


def _add_weights(file: BinaryIO, checkpoint: Checkpoint) -> None:
    """Weights are written before it is known how long they are."""
    start = file.tell()
    file.write(bytes(_BLOCK))
    write_torch_archive(Appending(file), module_state(checkpoint))
    end = file.seek(0, io.SEEK_END)
    file.seek(start)
    file.write(_header(_WEIGHTS, end - start - _BLOCK))
    file.seek(end)
    _fill(file)


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(f"./{name}")
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def _fill(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _BLOCK))


FORMAT = Format(
    "nemo", "NeMo", matches, read, write, is_folder=False, ending=_ENDING, needs_names=False,
    keeps=("tensors", "configuration", "arguments"),
)  # fmt: skip
