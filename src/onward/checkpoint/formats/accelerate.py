"""Folders of `accelerator.save_state`."""

from __future__ import annotations

from pathlib import Path

from onward.checkpoint.description import Checkpoint
from onward.checkpoint.folders import hugging_face_folder, torch_files
from onward.checkpoint.format import Format
from onward.checkpoint.trees import progress_of

_STATES = "random_states_"


def matches(path: Path) -> bool:
    return path.is_dir() and any(path.glob(f"{_STATES}*.pkl"))


def read(folder: Path) -> Checkpoint:
    trees = torch_files(folder)
    states = [progress_of(tree) for name, tree in trees.items() if name.startswith(_STATES)]
    return hugging_face_folder(folder, FORMAT.name, FORMAT.title, trees, progress=states[0] if states else {})


FORMAT = Format("accelerate", "Accelerate", matches, read)
