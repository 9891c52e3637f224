"""Files of `torch.save`."""

from __future__ import annotations

from pathlib import Path

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.pytorch.archive import is_torch_file, read_torch_file, write_torch_file
from onward.checkpoint.pytorch.contents import checkpoint_of, progress_of
from onward.checkpoint.pytorch.state_dicts import module_state, optimizer_state, up_to_date


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


FORMAT = Format("torch", "PyTorch", is_torch_file, read, write, is_folder=False, ending=".pt", needs_names=False)
