"""Folders of Ray Train: a list of checkpoints, each of which is a folder of whatever the training loop wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.formats import pytorch
from onward.checkpoint.matching import with_own_names
from onward.checkpoint.pytorch.trees import checkpoint_of, has, mapping, progress_of, torch_files, write_again
from onward.checkpoint.safetensors_files import read_json, write_json
from onward.errors import InvalidModelError, UnsupportedError, list_names
from onward.model.storage.files import is_plain_name

_SNAPSHOT = "checkpoint_manager_snapshot.json"
_VERSION = "2.60.0"
"""The version of Ray whose snapshot is written."""
_OF_RAY = "ray"
"""Under which the arguments of a checkpoint keep what Ray says of it."""


def read(folder: Path) -> Checkpoint:
    """The newest checkpoint, of whatever format it is."""
    snapshot = read_json(folder / _SNAPSHOT)
    newest = snapshot.get("latest_checkpoint_result")
    name = mapping(newest).get("checkpoint_dir_name")
    if not isinstance(name, str):
        raise InvalidModelError(f"`{folder / _SNAPSHOT}` names no checkpoint")
    if not is_plain_name(name):
        raise InvalidModelError(f"`{folder / _SNAPSHOT}` leads out of its folder, to `{name}`")
    if not (folder / name).is_dir():
        raise InvalidModelError(f"`{folder / name}` is not there, which Ray names as its newest checkpoint")
    found = _inside(folder / name)
    said = {"version": snapshot.get("ray_version"), "metrics": mapping(newest).get("metrics")}
    return dataclasses.replace(
        found, title=f"{FORMAT.title}, {found.title}", arguments={**found.arguments, _OF_RAY: said}
    )


def _inside(folder: Path) -> Checkpoint:
    """What the loop wrote: a checkpoint of its own, a file or folder that is one, or files of PyTorch."""
    if (known := _format_of(folder)) is not None:
        return known.read(folder)
    found = {path: format for path in sorted(folder.iterdir()) if (format := _format_of(path)) is not None}
    if len(found) == 1:
        ((path, format),) = found.items()
        return format.read(path)
    if found and all(format is pytorch.FORMAT for format in found.values()):
        trees = torch_files(folder)
        counted = [progress_of(tree) for tree in trees.values()]
        progress = {name: number for each in counted for name, number in each.items()}
        return checkpoint_of(folder, FORMAT.name, "files of PyTorch", trees, progress=progress, keeps_order=True)
    raise UnsupportedError(
        f"`{folder}` holds " + (f"several checkpoints: {list_names([p.name for p in found], 4)}" if found else "none"),
        hint="give the one that is meant" if found else "give what the training loop has saved",
    )


def _format_of(path: Path) -> Format | None:
    from onward.checkpoint.formats import FORMATS  # of which this is one

    return next((format for format in FORMATS if format is not FORMAT and format.matches(path)), None)


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """A list with one checkpoint, of the format that it is of; `checkpoint.pt` where that cannot be written."""
    place = folder / f"checkpoint_{checkpoint.step or 0:06d}"
    place.mkdir(parents=True)
    if checkpoint.format == FORMAT.name:
        write_again(checkpoint, place)
    else:
        from onward.checkpoint.formats import writable

        inner = writable().get(checkpoint.format, pytorch.FORMAT)
        assert inner.write is not None
        made = with_own_names(checkpoint) if inner.needs_names else checkpoint
        inner.write(made, place if inner.is_folder else place / _file(checkpoint, inner))
    said = mapping(checkpoint.arguments.get(_OF_RAY))
    write_json(folder / _SNAPSHOT, _snapshot(place.name, mapping(said.get("metrics"))))


def _file(checkpoint: Checkpoint, inner: Format) -> str:
    """The name that the loop gave its file, which it will look for again."""
    is_own = _OF_RAY in checkpoint.arguments and checkpoint.path.suffix == inner.ending
    return checkpoint.path.name if is_own else f"checkpoint{inner.ending}"


def _snapshot(name: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    result = {"version": 0, "checkpoint_dir_name": name, "metrics": dict(metrics)}
    return {
        "ray_version": _VERSION,
        "checkpoint_results": [result],
        "checkpoint_report_indices": [1],
        "latest_checkpoint_result": result,
        "pending_training_results": [],
        "pending_validation_specs": [],
        "current_report_index": 1,
        "validated_checkpoint_dir_names": [],
        "timed_out_validation_checkpoint_dir_names": [],
        "failed_validation_checkpoint_dir_names": [],
    }


FORMAT = Format(
    "ray", "Ray Train", has(_SNAPSHOT), read, write, needs_names=False,
    keeps=("tensors", "optimizers", "schedules", "step", "progress", "randomness"),
)  # fmt: skip
