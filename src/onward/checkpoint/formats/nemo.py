"""`.nemo` files of NVIDIA NeMo: a tar file with a configuration, weights and other files."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.pytorch.archive import Appending, read_torch_file, write_torch_archive
from onward.checkpoint.pytorch.contents import executed_names, mapping
from onward.checkpoint.pytorch.state_dicts import module_state
from onward.configuration import parse_yaml, write_yaml
from onward.errors import Error, InvalidModelError, UnsupportedError, list_names
from onward.model.storage.files import blame_file, regular
from onward.run_state.tensors import StoredTensor, Tensor

_CONFIGURATION, _WEIGHTS = "model_config.yaml", "model_weights.ckpt"
_MOST = 10_000
"""Largest number of files."""
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
    return is_model or path.suffix == _ENDING  # the reader reports the damage


def _members(path: Path) -> dict[str, tarfile.TarInfo]:
    members: dict[str, tarfile.TarInfo] = {}
    with blame_file(f"`{path}` is not a whole tar file", tarfile.TarError, OSError, ValueError, EOFError):
        regular(path)
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if len(members) > _MOST:
                    raise ValueError("it has too many files")
                if member.isreg() and not member.issparse():
                    members[member.name.removeprefix("./")] = member
    return members


def read(path: Path) -> Checkpoint:
    with open(path, "rb") as file:
        if file.read(2) == _COMPRESSED:
            raise UnsupportedError(
                f"`{path}` is compressed, so that its tensors cannot be located",
                hint=f"unpack it: `gunzip -S {_ENDING} -c {path.name} > plain{_ENDING}`",
            )
        members = _members(path)
        if _WEIGHTS not in members:
            is_split = any(name.startswith("model_weights/") for name in members)
            raise UnsupportedError(
                f"`{path}` has no `{_WEIGHTS}`" + (", but weights of several processes" if is_split else ""),
                hint="unpack it with `tar -xf`, and open its `model_weights`" if is_split else "give a whole model",
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
        remarks=("it holds a model without a run: NeMo stores runs as checkpoints of Lightning",),
    )


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Write the model with the original configuration, by which NeMo selects its class."""
    if checkpoint.format != FORMAT.name or not checkpoint.configuration:
        raise UnsupportedError(
            "a `.nemo` file needs a configuration of NeMo, which is missing",
            hint="start from a `.nemo` file that NeMo wrote",
        )
    others = _others(checkpoint)
    with open(path, "wb") as file:
        configuration = write_yaml(checkpoint.configuration).encode()
        file.write(_header(_CONFIGURATION, len(configuration)) + configuration)
        _fill(file)
        _add_weights(file, checkpoint)
        for name, other in others.items():
            file.write(_header(name, other.nbytes))
            other.write_to(file)
            _fill(file)
        file.write(bytes(2 * _BLOCK))


def _others(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Return the other files of the model, as locations."""
    if not checkpoint.files:
        return {}
    members = _members(checkpoint.path) if checkpoint.path.is_file() else {}
    if missing := [name for name in checkpoint.files if name not in members]:
        raise UnsupportedError(
            f"`{checkpoint.path}` is missing or has no {list_names(missing, 3)}, which belong to the model",
            hint=f"restore `{checkpoint.path}`",
        )
    byte = np.dtype(np.uint8)
    others = {name: members[name] for name in checkpoint.files}
    return {n: StoredTensor(checkpoint.path, m.offset_data, byte, (m.size,), (1,)) for n, m in others.items()}


def _add_weights(file: BinaryIO, checkpoint: Checkpoint) -> None:
    """Write weights, and then the header with their size."""
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
