"""Checkpoints of Orbax: steps that a manager saved, each with its items, or a tree alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.pytorch.trees import has
from onward.checkpoint.pytree import leaves, with_lists
from onward.checkpoint.pytree.train_states import INFORMATION, checkpoint_of_tree, tree_of
from onward.checkpoint.pytree.zarr_trees import TREE, read_layout, read_tree, write_tree
from onward.checkpoint.safetensors_files import read_json, write_json
from onward.errors import UnsupportedError
from onward.model.storage.files import SENSELESS, blame_file
from onward.recipe.spec import parse
from onward.run_state.tensors import Tensor

JSON = "metadata"
_KEY = "jax_random_key"
"""What an item has that is a key of random numbers."""
_OURS = "onward"
"""Where words of a recipe are, which only we read."""
_DATA = ("data", "dataset", "data_iter", "data_iterator", "iterator")
"""Items that say where in its data a training is."""
_ALONE = "."
"""The name of a tree that is in no item."""
_NUMBER = re.compile(r"(?:.*_)?(\d{1,18})")

_is_step = has(INFORMATION, TREE)


def _matches(path: Path) -> bool:
    return path.is_dir() and (_is_step(path) or bool(_steps(path)))


def _steps(folder: Path) -> dict[int, Path]:
    """The steps that a manager saved, in their order."""
    numbers = {path: match for path in folder.iterdir() if (match := _NUMBER.fullmatch(path.name)) and _is_step(path)}
    return {int(match[1]): path for path, match in sorted(numbers.items(), key=lambda each: int(each[1][1]))}


def read(path: Path) -> Checkpoint:
    if _is_step(path):
        return _read_step(path)
    *others, newest = (steps := _steps(path))
    said = f"this is step {newest}, the newest; there are also {', '.join(map(str, others))}, each in its folder"
    return _read_step(steps[newest], remarks=(said,) if others else ())


def _read_step(folder: Path, **facts: Any) -> Checkpoint:
    info = read_json(folder / INFORMATION) if (folder / INFORMATION).is_file() else {}
    alone = (folder / TREE).is_file()
    items = {_ALONE: read_tree(folder)} if alone else _items(folder)
    if not items:
        raise UnsupportedError(
            f"`{folder}` holds no tree", hint="only items that are trees, JSON or random keys are read"
        )
    trees = {name: tree for name, tree in items.items() if (folder / name / TREE).is_file()}
    layouts = [read_layout(folder / name) for name in trees]
    found = checkpoint_of_tree(
        folder, FORMAT.name, FORMAT.title, next(iter(items.values())) if len(items) == 1 else items,
        trees={**items, INFORMATION: info}, layout={key: part for each in layouts for key, part in each.items()},
        files=() if alone else _others(folder, items), data=next((items[name] for name in _DATA if name in items), {}),
        **facts,
    )  # fmt: skip
    number = _NUMBER.fullmatch(folder.name)
    if found.step is None and number and not alone:
        found = dataclasses.replace(found, step=int(number[1]))
    custom = info.get("custom_metadata")
    return with_words(found, custom.get(_OURS) if isinstance(custom, dict) else None)


def _others(folder: Path, items: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(each.name for each in folder.iterdir() if each.is_dir() and each.name not in items))


def _items(folder: Path) -> dict[str, Any]:
    """What a step or an item is made of, by name: trees, JSON, and folders of such."""
    found: dict[str, Any] = {}
    for path in sorted(each for each in folder.iterdir() if each.is_dir()):
        if (path / TREE).is_file():
            found[path.name] = read_tree(path)
        elif (path / JSON).is_file():
            found[path.name] = read_json(path / JSON)
        elif (path / _KEY).is_dir():
            found[path.name] = _items(path)
    return found


# ---- writing ---------------------------------------------------------------------------------------------------------

_HANDLERS = "orbax.checkpoint._src.handlers."
_OF_TREES = f"{_HANDLERS}standard_checkpoint_handler.StandardCheckpointHandler"
_DONE = "commit_success.txt"


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Write what a manager saves: a folder for the step, with items; a tree alone if it was one that was read."""
    tree = tree_of(checkpoint, None)
    items = [name for name in checkpoint.trees if name != INFORMATION] if checkpoint.format == FORMAT.name else []
    if items == [_ALONE]:
        write_tree(tree, path)
        _finish(path, _OF_TREES, checkpoint)
        return
    if checkpoint.format == "flax":
        tree = with_lists(tree)
    folder = path / str(checkpoint.step or 0)
    folder.mkdir(parents=True)
    parts = tree if len(items) > 1 else {items[0] if items else "default": tree}
    for name, part in parts.items():
        _write_item(part, folder / name)
    known = checkpoint.trees.get(INFORMATION, {}).get("item_handlers") if items else None
    _finish(folder, known or dict.fromkeys(parts, _OF_TREES), checkpoint)


def _write_item(tree: Any, folder: Path) -> None:
    if isinstance(tree, Mapping) and _KEY in tree:
        folder.mkdir()
        for name, part in tree.items():
            _write_item(part, folder / name)
    elif any(isinstance(leaf, Tensor) for _, leaf in leaves(tree)):
        write_tree(tree, folder)
    else:
        folder.mkdir()
        write_json(folder / JSON, tree)
    (folder / _DONE).write_text("written by onward")


def _finish(folder: Path, handlers: Any, checkpoint: Checkpoint) -> None:
    before = checkpoint.trees.get(INFORMATION, {}) if checkpoint.format == FORMAT.name else {}
    custom = {**(before.get("custom_metadata") or {}), _OURS: words_of(checkpoint)}
    described: dict[str, Any] = {"item_handlers": handlers, "metrics": {}, "performance_metrics": {}}
    times: dict[str, Any] = {"init_timestamp_nsecs": None, "commit_timestamp_nsecs": None}
    write_json(folder / INFORMATION, {**described, **times, "custom_metadata": custom})
    (folder / _DONE).write_text("written by onward")


FORMAT = Format(
    "orbax",
    "Orbax",
    _matches,
    read,
    write,
    keeps=("tensors", "optimizers", "schedules", "step", "randomness", "data", "averages", "clip"),
)


# ---- words of a recipe -----------------------------------------------------------------------------------------------


def words_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the optimizers, schedules, clipping and accumulation of a checkpoint; nothing where it does not tell."""
    groups = [group for each in checkpoint.optimizers for group in each.groups]
    if not groups or any(group.optimizer is None for group in groups):
        return {}
    return {
        "groups": [{"optimizer": str(group.optimizer), "parameters": [*group.parameters]} for group in groups],
        "schedules": [None if each.words is None else [*map(str, each.words)] for each in checkpoint.schedules],
        "every": [each.every for each in checkpoint.schedules],
        "clip": checkpoint.clip and dict(checkpoint.clip),
        "accumulate": checkpoint.accumulate,
    }


def with_words(checkpoint: Checkpoint, words: Any) -> Checkpoint:
    """A checkpoint that says what was written beside it. Groups are those of the words, if they name the same."""
    if not words or len(checkpoint.optimizers) != 1:
        return checkpoint
    (optimizer,) = checkpoint.optimizers
    with blame_file(f"what `{checkpoint.path}` says of its optimizer cannot be read", *SENSELESS):
        said = [(parse(str(group["optimizer"])), tuple(map(str, group["parameters"]))) for group in words["groups"]]
        schedules = [None if each is None else tuple(parse(str(spec)) for spec in each) for each in words["schedules"]]
        units = [None if each is None else int(each) for each in words.get("every") or [None] * len(schedules)]
        clip = words["clip"] and dict(words["clip"])
        accumulate = None if words.get("accumulate") is None else int(words["accumulate"])
    stored = {name: group for group in optimizer.groups for name in group.parameters}
    if {*stored} != {name for _, names in said for name in names}:
        return checkpoint
    # What optax stores does not tell apart groups that keep nothing, such as several of SGD.
    groups = tuple(
        dataclasses.replace(stored[names[0]], parameters=names, optimizer=spec) for spec, names in said if names
    )
    families = dict.fromkeys(group.optimizer.name for group in groups if group.optimizer)
    found = []
    for each, told, every in zip(checkpoint.schedules, schedules or [()], units or [None], strict=False):
        position = each.position
        if position is not None and every is not None and every > 1:
            position //= every  # optax counts updates
        found.append(dataclasses.replace(each, words=told, every=every or each.every, position=position))
    return dataclasses.replace(
        checkpoint,
        optimizers=(dataclasses.replace(optimizer, groups=groups, families=tuple(families)),),
        schedules=tuple(found) or checkpoint.schedules,
        clip=clip,
        accumulate=accumulate if checkpoint.accumulate is None else accumulate or checkpoint.accumulate,
    )
