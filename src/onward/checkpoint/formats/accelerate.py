"""Folders of `accelerator.save_state`."""

from __future__ import annotations

from pathlib import Path

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.pytorch.archive import write_torch_file
from onward.checkpoint.pytorch.contents import contents_of, hugging_face_folder, torch_files, write_again
from onward.checkpoint.pytorch.state_dicts import optimizer_state
from onward.checkpoint.safetensors_files import MODEL, PYTORCH, write_safetensors

_STATES = "random_states_"


def matches(path: Path) -> bool:
    return path.is_dir() and any(path.glob(f"{_STATES}*.pkl"))


def read(folder: Path) -> Checkpoint:
    """Read all but `step`, which counts batches since an epoch began."""
    return hugging_face_folder(folder, FORMAT.name, FORMAT.title, torch_files(folder))


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a folder that `accelerator.load_state` resumes."""
    if checkpoint.format != FORMAT.name or not contents_of(checkpoint.trees)["modules"]:
        write_safetensors(folder / MODEL, checkpoint.tensors, PYTORCH)
    if checkpoint.format == FORMAT.name:
        write_again(checkpoint, folder)
        return
    for number, optimizer in enumerate(checkpoint.optimizers):
        write_torch_file(folder / f"optimizer{_suffix(number)}.bin", optimizer_state(optimizer))
    for number, schedule in enumerate(checkpoint.schedules):
        write_torch_file(folder / f"scheduler{_suffix(number)}.bin", {**schedule.state})
    keys = {"Python": "random_state", "numpy": "numpy_random_seed", "torch, CPU": "torch_manual_seed"}
    states = {keys[generator.kind]: generator.state for generator in checkpoint.randomness if generator.kind in keys}
    write_torch_file(folder / f"{_STATES}0.pkl", {"step": 0, **states})


def _suffix(number: int) -> str:
    return f"_{number}" if number else ""


FORMAT = Format("accelerate", "Accelerate", matches, read, write, needs_names=False)
