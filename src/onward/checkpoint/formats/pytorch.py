"""What `torch.save` writes."""

from __future__ import annotations

from pathlib import Path

from onward.checkpoint.archive import is_torch_file, read_torch_file
from onward.checkpoint.description import Checkpoint
from onward.checkpoint.format import Format
from onward.checkpoint.trees import checkpoint_of, progress_of


def read(path: Path) -> Checkpoint:
    tree = read_torch_file(path)
    return checkpoint_of(path, FORMAT.name, FORMAT.title, {path.name: tree}, progress=progress_of(tree))


FORMAT = Format("torch", "PyTorch", is_torch_file, read, is_folder=False, ending=".pt")
