"""Files of `torch.save`."""

from __future__ import annotations

import zipfile
from pathlib import Path

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.pytorch.archive import is_torch_file, mentions, read_torch_file, write_torch_file
from onward.checkpoint.pytorch.contents import (
    ENDINGS,
    checkpoint_of,
    contents_of,
    hugging_face_folder,
    progress_of,
    torch_files,
    write_again,
)
from onward.checkpoint.pytorch.state_dicts import module_state, optimizer_state, up_to_date
from onward.checkpoint.safetensors_files import MODEL, PYTORCH, write_safetensors
from onward.errors import UnsupportedError, list_names
from onward.model.storage.containers import BAD_ZIP


def read(path: Path) -> Checkpoint:
    tree = read_torch_file(path)
    trees = {path.name: tree}
    return checkpoint_of(path, FORMAT.name, FORMAT.title, trees, progress=progress_of(tree), keeps_order=True)


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Write the original file with current numbers, or a new dict."""
    if checkpoint.format == FORMAT.name and checkpoint.trees:
        (tree,) = up_to_date(checkpoint.trees, checkpoint).values()
    else:
        optimizers = [optimizer_state(optimizer) for optimizer in checkpoint.optimizers]
        tree = {
            "model": module_state(checkpoint),
            "optimizer": optimizers[0] if len(optimizers) == 1 else optimizers,
            **({"scheduler": dict(checkpoint.schedules[0].state)} if checkpoint.schedules else {}),
            **dict(checkpoint.progress),
        }
    write_torch_file(path, tree)


def _is_folder(folder: Path) -> bool:
    """True for a folder with an optimizer in one of its files of `torch.save`, and the model in another file.

    Each may be in a folder below, as those of torchtune are.
    """
    if not folder.is_dir():
        return False
    folders = [folder, *(path for path in folder.iterdir() if path.is_dir())]
    files = [path for inner in folders for path in inner.iterdir() if path.suffix in ENDINGS and is_torch_file(path)]
    models = {path.parent for inner in folders for path in inner.glob("*.safetensors")}
    states = {path.parent for path in files if mentions(path, "param_groups")}
    if folder in states:
        return folder in models or sum(path.parent == folder for path in files) > 1
    return len(states) == 1 and bool(models) and models.isdisjoint({folder, *states})


def _read_folder(folder: Path) -> Checkpoint:
    """Read the files of a script that saves the model, the optimizer and others apart."""
    trees = torch_files(folder)
    for inner in () if trees else sorted(path for path in folder.iterdir() if path.is_dir()):
        trees |= {f"{inner.name}/{name}": tree for name, tree in torch_files(inner).items()}
    parts = {name: contents_of({name: tree}) for name, tree in trees.items()}
    complete = [name for name, found in parts.items() if found["modules"] and found["optimizers"]]
    if len(complete) > 1:
        raise UnsupportedError(
            f"`{folder}` holds several checkpoints: {list_names(complete, 4)}",
            hint=f"open one: `{folder / complete[-1]}`",
        )
    facts = {"progress": {name: value for tree in trees.values() for name, value in progress_of(tree).items()}}
    return hugging_face_folder(folder, FOLDER.name, FOLDER.title, trees, **facts)


def _write_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the original files with current numbers, or one file."""
    if checkpoint.format == FOLDER.name:
        if not contents_of(checkpoint.trees)["modules"]:
            write_safetensors(folder / MODEL, checkpoint.tensors, PYTORCH)
        write_again(checkpoint, folder)
    else:
        write(checkpoint, folder / "checkpoint.pt")


def is_packed(path: Path) -> bool:
    """True for a zip file with files of `torch.save`, such as those of stable-baselines3."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(ENDINGS) for name in archive.namelist())
    except BAD_ZIP:
        return False


FOLDER = Format("torch-files", "files of PyTorch", _is_folder, _read_folder, _write_folder, needs_names=False)
FORMAT = Format("torch", "PyTorch", is_torch_file, read, write, is_folder=False, ending=".pt", needs_names=False)
