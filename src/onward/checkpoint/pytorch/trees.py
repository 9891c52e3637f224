"""Checkpoints from the trees and folders of PyTorch's files, which nearly all of its frameworks write."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytorch.archive import is_torch_file, read_torch_file, write_torch_file
from onward.checkpoint.pytorch.pickling import Attributed, Name, Object
from onward.checkpoint.pytorch.states import (
    is_optimizer_state,
    is_schedule_state,
    optimizer_of,
    schedule_of,
    up_to_date,
)
from onward.checkpoint.safetensors_files import INDEX, read_json, read_model_folder, write_json
from onward.errors import InvalidModelError
from onward.model.storage.files import is_plain_name
from onward.run_state.state import OptimizerState, RandomState
from onward.run_state.tensors import Tensor, count_of, is_number

_MOST_NODES = 5_000_000
"""Of a tree. A small pickle can describe one without end, by naming the same part again and again."""

_HARMLESS = ("torch", "collections", "numpy", "builtins", "__builtin__")
"""Modules of names that are types and classes of data in every checkpoint."""


_HARMFUL = ("eval", "exec", "getattr", "setattr", "open", "compile", "__import__", "apply", "execfile", "input")


def nodes(tree: Any) -> Iterator[Any]:
    """All that a tree holds, each thing once."""
    seen: set[int] = set()
    pending = [tree]
    while pending:
        here = pending.pop()
        if id(here) in seen:
            continue
        if len(seen) > _MOST_NODES:
            raise InvalidModelError("the checkpoint holds more objects than any does")
        if isinstance(here, dict | list | tuple | set | frozenset | Object):
            seen.add(id(here))
        yield here
        pending.extend(_parts(here))


def _parts(tree: Any) -> list[Any]:
    if isinstance(tree, Object):
        return [tree.of, tree.arguments, tree.keywords, tree.state, tree.items, tree.entries]
    if isinstance(tree, dict):
        attributes = [tree.attributes] if isinstance(tree, Attributed) else []
        return [*tree, *tree.values(), *attributes]
    return list(tree) if isinstance(tree, list | tuple | set | frozenset) else []


def executed_names(tree: Any) -> tuple[str, ...]:
    """What a loader that trusts the file would import and call, but for what all files are made of."""
    names = {str(node) for node in nodes(tree) if isinstance(node, Name) and not is_harmless(node)}
    return tuple(sorted(names))


def is_harmless(name: Name) -> bool:
    """Whether it is of what all checkpoints are made of."""
    if name.module.startswith(("torch.", "numpy.")):
        return False
    return name.module in _HARMLESS and name.name not in _HARMFUL


@dataclasses.dataclass
class Contents:
    """The parts of a tree that are of a known kind."""

    modules: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    optimizers: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    schedules: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    randomness: list[RandomState] = dataclasses.field(default_factory=list)
    averages: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    scalers: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    data: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)


def contents_of(*trees: Any) -> Contents:
    """What is in trees of dicts and lists: the outermost parts that are something."""
    found = Contents()
    pending = [(tree, _DEEPEST) for tree in reversed(trees)]
    while pending:
        tree, depth = pending.pop()
        if is_optimizer_state(tree):
            found.optimizers.append(tree)
        elif is_schedule_state(tree):
            found.schedules.append(tree)
        elif (kind := _random_kind(tree)) is not None:
            found.randomness.append(RandomState(kind, tree))
        elif isinstance(tree, Mapping) and tree.keys() >= _SCALER:
            found.scalers.append(tree)
        elif isinstance(tree, Mapping) and tree.keys() >= _LOADER:
            found.data.append(tree)
        elif _is_module_state(tree):
            (found.averages if AVERAGED in tree else found.modules).append(tree)
        elif depth and isinstance(tree, Mapping | list):
            inside = list(tree.values() if isinstance(tree, Mapping) else tree)
            pending += [(part, depth - 1) for part in reversed(inside)]
    return found


_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval"}
"""What the state of a `GradScaler` has."""
_LOADER = {"_num_yielded", "_sampler_iter_yielded"}
"""What the state of a `StatefulDataLoader` has."""
AVERAGED = "n_averaged"
"""What the state of an `AveragedModel` has beside that of its module."""
_DEEPEST = 3
"""How far below the top what users save is looked for."""


def _is_module_state(tree: Any) -> bool:
    """Whether a tree is tensors by name."""
    return (
        isinstance(tree, Mapping)
        and any(isinstance(value, Tensor) and _random_kind(value) is None for value in tree.values())
        and all(isinstance(key, str) for key in tree)
        and all(isinstance(value, Tensor | Object | int | float | bytes) for value in tree.values())
    )


def _random_kind(tree: Any) -> str | None:
    """Which generator of random numbers a tree is the state of."""
    if isinstance(tree, Tensor) and tree.dtype == np.uint8 and len(tree.shape) == 1:
        return {5056: "torch, CPU", 16: "torch, CUDA"}.get(tree.shape[0])
    if isinstance(tree, tuple) and len(tree) == 3 and isinstance(tree[1], tuple) and len(tree[1]) == 625:
        return "Python"
    if isinstance(tree, tuple) and len(tree) == 5 and tree[0] == "MT19937":
        return "numpy"
    return None


UPDATES = ("global_step", "global_steps", "step", "iteration")
"""What frameworks call the number of updates."""
_COUNTERS = (*UPDATES, "epoch", "max_steps", "num_train_epochs")


def checkpoint_of(path: Path, format: str, title: str, trees: Mapping[str, Any], **facts: Any) -> Checkpoint:
    """What is in trees. `facts` are fields of the checkpoint that are known already."""
    found = contents_of(*trees.values())
    remarks = tuple(facts.pop("remarks", ()))
    tensors = facts.pop("tensors", None)
    if tensors is None:
        tensors = found.modules[0] if found.modules else {}
        if len(found.modules) > 1:
            remarks = (*remarks, f"{len(found.modules)} modules are in it; this is the first")
    optimizers = tuple(map(optimizer_of, found.optimizers))
    group = next((group.settings for each in optimizers for group in each.groups), {})
    known = {
        "optimizers": optimizers,
        "schedules": tuple(schedule_of(state, group) for state in found.schedules),
        "randomness": tuple(found.randomness),
        "scaler": found.scalers[0] if found.scalers else {},
        "data": found.data[0] if found.data else {},
        "averages": {
            name.removeprefix("module."): tensor  # an `AveragedModel` holds its module
            for name, tensor in (found.averages[0] if found.averages else {}).items()
            if isinstance(tensor, Tensor) and name.startswith("module.")
        },
        "average_updates": averages_made(found.averages[0]) if found.averages else None,
        "trees": trees,
        "executes": executed_names(trees),
        **facts,
    }
    step = known.pop("step", None)
    if step is None:
        step = step_of(known.get("progress", {}), known["optimizers"])
    kept = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, Tensor)}
    return Checkpoint(path=path, format=format, title=title, tensors=kept, step=step, remarks=remarks, **known)


def averages_made(state: Mapping[str, Any]) -> int | None:
    """Return how many updates of averages an `AveragedModel` has counted."""
    count = state.get(AVERAGED)
    return count_of(count) if is_number(count) else None


def step_of(progress: Mapping[str, Any], optimizers: Sequence[OptimizerState]) -> int | None:
    """Return the updates made, as the training loop or else the optimizer counts them.

    Steps of a scheduler do not count: loops call it after each update, or after each epoch.
    """
    for name in UPDATES:
        if isinstance(progress.get(name), int):
            return int(progress[name])
    return max((optimizer.count for optimizer in optimizers if optimizer.count is not None), default=None)


def progress_of(tree: Any) -> dict[str, Any]:
    counters = tree if isinstance(tree, Mapping) else {}
    return {name: counters[name] for name in _COUNTERS if isinstance(counters.get(name), int | float)}


def mapping(tree: Any) -> Mapping[str, Any]:
    """A tree that is a mapping; nothing if it is none."""
    return tree if isinstance(tree, Mapping) else {}


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
    others = []  # neither tensors of the model, nor a training model that was written beside them
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name not in known):
        is_stored = path.suffix == ".data" and path.with_suffix(".onnx").exists()
        if path.suffix not in (".safetensors", ".onnx") and not is_stored:
            others.append(path.name)
    return checkpoint_of(folder, format, title, trees, files=tuple(others), **facts)
