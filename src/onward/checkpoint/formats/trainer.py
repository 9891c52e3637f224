"""Folders of the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path

from onward.checkpoint.description import Checkpoint
from onward.checkpoint.folders import has, hugging_face_folder, torch_files
from onward.checkpoint.format import Format
from onward.checkpoint.objects import Object
from onward.checkpoint.safetensors_files import read_json
from onward.checkpoint.trees import mapping, progress_of

STATE = "trainer_state.json"


def read(folder: Path) -> Checkpoint:
    state = read_json(folder / STATE)
    trees = torch_files(folder)
    arguments = trees.get("training_args.bin")
    return hugging_face_folder(
        folder,
        FORMAT.name,
        FORMAT.title,
        {STATE: state, **trees},
        progress=progress_of(state),
        arguments=mapping(arguments.state if isinstance(arguments, Object) else None),
    )


FORMAT = Format("hf", "Hugging Face Trainer", has(STATE), read)
