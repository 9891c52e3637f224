"""What folders of PyTorch's frameworks have in common."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytorch.archive import is_torch_file, read_torch_file, write_torch_file
from onward.checkpoint.pytorch.states import up_to_date
from onward.checkpoint.pytorch.trees import checkpoint_of
from onward.checkpoint.safetensors_files import INDEX, read_json, read_model_folder, write_json
from onward.model.storage.files import is_plain_name

_ENDINGS = (".pt", ".pth", ".bin", ".pkl")


def has(*names: str) -> Callable[[Path], bool]:
    """Whether a folder has one of these files."""
    return lambda folder: folder.is_dir() and any((folder / name).is_file() for name in names)


def torch_files(folder: Path) -> dict[str, Any]:
    """The trees of the files of PyTorch in a folder."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _ENDINGS and is_torch_file(path))
    return {path.name: read_torch_file(path) for path in files}


def write_again(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the files that a checkpoint was read from, up to date.

    What else was in its folder, such as a tokenizer, is copied, where that is still there.
    """
    for name, tree in up_to_date(checkpoint.trees, checkpoint).items():
        (write_json if name.endswith(".json") else write_torch_file)(folder / name, tree)
    for name in checkpoint.files:
        if is_plain_name(name) and (source := checkpoint.path / name).is_file():
            shutil.copyfile(source, folder / name)


def hugging_face_folder(folder: Path, format: str, title: str, trees: Mapping[str, Any], **facts: Any) -> Checkpoint:
    """A model in safetensors, its configuration, and files of PyTorch beside it."""
    if (folder / INDEX).exists() or (folder / "model.safetensors").exists():
        facts["tensors"] = read_model_folder(folder)
    if (folder / "config.json").exists():
        facts["configuration"] = read_json(folder / "config.json")
        trees = {**trees, "config.json": facts["configuration"]}
    known = {*trees, INDEX}
    others = sorted(
        path.name for path in folder.iterdir() if path.is_file() and path.name not in known and not _is_model(path)
    )
    return checkpoint_of(folder, format, title, trees, files=tuple(others), **facts)


def _is_model(path: Path) -> bool:
    """Whether a file is of the model itself: its tensors, or a training model that was written beside them."""
    return path.suffix in (".safetensors", ".onnx") or (path.suffix == ".data" and path.with_suffix(".onnx").exists())
