"""Tensors alone: a `.safetensors` file, or the folder of a Hugging Face model."""

from __future__ import annotations

from pathlib import Path

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.pytorch.contents import has, hugging_face_folder
from onward.checkpoint.safetensors_files import INDEX, PYTORCH, read_safetensors, write_safetensors


def read(path: Path) -> Checkpoint:
    return Checkpoint(path=path, format=FORMAT.name, title=FORMAT.title, tensors=read_safetensors(path))


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Write the tensors of the model alone."""
    write_safetensors(path, checkpoint.tensors, PYTORCH)


def _read_folder(folder: Path) -> Checkpoint:
    return hugging_face_folder(folder, FOLDER.name, FOLDER.title, {})


FORMAT = Format(
    "safetensors", "safetensors", lambda path: path.is_file() and path.suffix == ".safetensors", read, write,
    is_folder=False, ending=".safetensors", needs_names=False, keeps=("tensors",),
)  # fmt: skip
FOLDER = Format("hf-model", "Hugging Face model", has(INDEX, "model.safetensors"), _read_folder)
