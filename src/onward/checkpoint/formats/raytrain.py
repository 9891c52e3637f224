"""Folders of Ray Train: a list of checkpoints, which are folders of any content."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.formats import pytorch
from onward.checkpoint.name_matching import with_own_names
from onward.checkpoint.pytorch.contents import has, mapping
from onward.checkpoint.safetensors_files import read_json, write_json
from onward.errors import InvalidModelError, UnsupportedError, list_names
from onward.model.storage.files import is_plain_name

_SNAPSHOT = "checkpoint_manager_snapshot.json"
_VERSION = "2.60.0"
"""Version of Ray whose snapshot is written."""
_OF_RAY = "ray"
"""Key of Ray's facts in the arguments of a checkpoint."""


def read(folder: Path) -> Checkpoint:
    """Read the newest checkpoint, in any format."""
    snapshot = read_json(folder / _SNAPSHOT)
    newest = snapshot.get("latest_checkpoint_result")
    name = mapping(newest).get("checkpoint_dir_name")
    if not isinstance(name, str):
        raise InvalidModelError(f"`{folder / _SNAPSHOT}` names no checkpoint")
    if not is_plain_name(name):
        raise InvalidModelError(f"`{folder / _SNAPSHOT}` leads out of its folder, to `{name}`")
    if not (folder / name).is_dir():
        raise InvalidModelError(f"`{folder / name}` is missing, which Ray names as its newest checkpoint")
    checkpoint = _inside(folder / name)
    ray_facts = {"version": snapshot.get("ray_version"), "metrics": mapping(newest).get("metrics")}
    return dataclasses.replace(
        checkpoint, title=f"{FORMAT.title}, {checkpoint.title}", arguments={**checkpoint.arguments, _OF_RAY: ray_facts}
    )


def _inside(folder: Path) -> Checkpoint:
    """Return the checkpoint that a folder is or contains."""
    if (folder_format := _format_of(folder)) is not None:
        return folder_format.read(folder)
    formats = {path: format for path in sorted(folder.iterdir()) if (format := _format_of(path)) is not None}
    if len(formats) == 1:
        ((path, format),) = formats.items()
        return format.read(path)
    if formats:
        names = list_names([path.name for path in formats], 4)
        raise UnsupportedError(
            f"`{folder}` holds several checkpoints: {names}", hint=f"open one: `{next(iter(formats))}`"
        )
    raise UnsupportedError(f"`{folder}` holds no checkpoint", hint="open the file that the training loop saved")


def _format_of(path: Path) -> Format | None:
    from onward.checkpoint.formats import FORMATS  # of which this is one

    return next((format for format in FORMATS if format is not FORMAT and format.matches(path)), None)


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a list with one checkpoint, in its own format or as `checkpoint.pt`."""
    target = folder / f"checkpoint_{checkpoint.step or 0:06d}"
    target.mkdir(parents=True)
    from onward.checkpoint.formats import writable

    inner = writable().get(checkpoint.format, pytorch.FORMAT)
    assert inner.write is not None
    named = with_own_names(checkpoint) if inner.needs_names else checkpoint
    # The training loop looks for the name that it gave its file.
    is_own = _OF_RAY in checkpoint.arguments and checkpoint.path.suffix == inner.ending
    file = checkpoint.path.name if is_own else f"checkpoint{inner.ending}"
    inner.write(named, target if inner.is_folder else target / file)
    metrics = mapping(mapping(checkpoint.arguments.get(_OF_RAY)).get("metrics"))
    result = {"version": 0, "checkpoint_dir_name": target.name, "metrics": dict(metrics)}
    snapshot = {
        "ray_version": _VERSION,
        "checkpoint_results": [result],
        "checkpoint_report_indices": [1],
        "latest_checkpoint_result": result,
        "pending_training_results": [],
        "pending_validation_specs": [],
        "current_report_index": 1,
        **{f"{state}_checkpoint_dir_names": [] for state in ("validated", "timed_out_validation", "failed_validation")},
    }
    write_json(folder / _SNAPSHOT, snapshot)


FORMAT = Format(
    "ray", "Ray Train", has(_SNAPSHOT), read, write, needs_names=False,
    keeps=("tensors", "optimizers", "schedules", "step", "progress", "randomness"),
)  # fmt: skip
