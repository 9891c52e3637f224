"""Tensors alone: a `.safetensors` file, or the folder of a Hugging Face model."""

from __future__ import annotations

from pathlib import Path

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.pytorch.contents import copy_files, has, hugging_face_folder
from onward.checkpoint.safetensors_files import INDEX, MODEL, PYTORCH, read_safetensors, write_json, write_safetensors
from onward.run_state.tensors import Tensor


def read(path: Path) -> Checkpoint:
    return Checkpoint(path=path, format=FORMAT.name, title=FORMAT.title, tensors=read_safetensors(path))


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Write the tensors of the model alone."""
    write_safetensors(path, checkpoint.tensors, PYTORCH)


def _read_folder(folder: Path) -> Checkpoint:
    return hugging_face_folder(folder, FOLDER.name, FOLDER.title, {})


_LARGEST = 5_000_000_000
"""Bytes of a shard, as in transformers."""


def _write_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the weights, in shards with an index if they are large, the configuration and other files."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in checkpoint.tensors.items():
        if shards[-1] and sum(other.nbytes for other in shards[-1].values()) + tensor.nbytes > _LARGEST:
            shards.append({})
        shards[-1][name] = tensor
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(names if len(shards) > 1 else [MODEL], shards, strict=True):
        write_safetensors(folder / file, shard, PYTORCH)
    if len(shards) > 1:
        files = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})
    if "model_type" in checkpoint.configuration:
        write_json(folder / "config.json", checkpoint.configuration)
    copy_files(checkpoint, folder)


FORMAT = Format(
    "safetensors", "safetensors", lambda path: path.is_file() and path.suffix == ".safetensors", read, write,
    is_folder=False, ending=".safetensors", needs_names=False, keeps=("tensors",),
)  # fmt: skip
FOLDER = Format(
    "hf-model", "Hugging Face model", has(INDEX, MODEL), _read_folder, _write_folder, needs_names=False,
    keeps=("tensors", "configuration"),
)  # fmt: skip
