"""Checkpoints of Orbax: steps with items that a manager saved, or a single tree."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.pytorch.contents import has
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
"""Entry of an item that is a random key."""
_OURS = "onward"
"""Key of a recipe's options in the metadata, which only Onward reads."""
_DATA = ("data", "dataset", "data_iter", "data_iterator", "iterator")
"""Items with the position in the training data."""
_ALONE = "."
"""Name of a tree without items."""
_NUMBER = re.compile(r"(?:.*_)?(\d{1,18})")

_is_step = has(INFORMATION, TREE)


def _steps(folder: Path) -> dict[int, Path]:
    """Return the steps that a manager saved, in order."""
    numbers = {path: match for path in folder.iterdir() if (match := _NUMBER.fullmatch(path.name)) and _is_step(path)}
    return {int(match[1]): path for path, match in sorted(numbers.items(), key=lambda item: int(item[1][1]))}


def read(path: Path) -> Checkpoint:
    if _is_step(path):
        return _read_step(path)
    *others, newest = (steps := _steps(path))
    remark = f"this is step {newest}, the newest; others are {', '.join(map(str, others))}, each in its folder"
    return _read_step(steps[newest], (remark,) if others else ())


def _read_step(folder: Path, remarks: tuple[str, ...] = ()) -> Checkpoint:
    info = read_json(folder / INFORMATION) if (folder / INFORMATION).is_file() else {}
    is_single_tree = (folder / TREE).is_file()
    items = {_ALONE: read_tree(folder)} if is_single_tree else _items(folder)
    if not items:
        raise UnsupportedError(
            f"`{folder}` holds no tree", hint="only items that are trees, JSON or random keys are read"
        )
    layout: dict[str, Any] = {}
    for name in items:
        layout |= read_layout(folder / name) if (folder / name / TREE).is_file() else {}
    others = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name not in items)
    checkpoint = checkpoint_of_tree(
        folder, FORMAT.name, FORMAT.title, next(iter(items.values())) if len(items) == 1 else items,
        trees={**items, INFORMATION: info}, files=() if is_single_tree else tuple(others), layout=layout,
        data=next((items[name] for name in _DATA if name in items), {}), remarks=remarks,
    )  # fmt: skip
    number = _NUMBER.fullmatch(folder.name)
    if checkpoint.step is None and number and not is_single_tree:
        checkpoint = dataclasses.replace(checkpoint, step=int(number[1]))
    custom = info.get("custom_metadata")
    return with_words(checkpoint, custom.get(_OURS) if isinstance(custom, dict) else None)


def _items(folder: Path) -> dict[str, Any]:
    """Return the parts of a step or item by name: trees, JSON, and folders of these."""
    items: dict[str, Any] = {}
    for path in sorted(child for child in folder.iterdir() if child.is_dir()):
        if (path / TREE).is_file():
            items[path.name] = read_tree(path)
        elif (path / JSON).is_file():
            items[path.name] = read_json(path / JSON)
        elif (path / _KEY).is_dir():
            items[path.name] = _items(path)
    return items


_OF_TREES = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
_DONE = "commit_success.txt"


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Write a folder for the step, as a manager does; or a single tree if one was read."""
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
    for name, item in parts.items():
        _write_item(item, folder / name)
    handlers = checkpoint.trees.get(INFORMATION, {}).get("item_handlers") if items else None
    _finish(folder, handlers or dict.fromkeys(parts, _OF_TREES), checkpoint)


def _write_item(tree: Any, folder: Path) -> None:
    if isinstance(tree, Mapping) and _KEY in tree:
        folder.mkdir()
        for name, child in tree.items():
            _write_item(child, folder / name)
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
    "orbax", "Orbax", lambda path: path.is_dir() and (_is_step(path) or bool(_steps(path))), read, write,
    keeps=("tensors", "optimizers", "schedules", "step", "randomness", "data", "averages", "clip"),
)  # fmt: skip


def words_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the options of a recipe in a checkpoint; empty if unknown."""
    groups = checkpoint.stored_groups
    if not groups or any(group.optimizer is None for group in groups):
        return {}
    return {
        "groups": [{"optimizer": str(group.optimizer), "parameters": [*group.parameters]} for group in groups],
        "schedules": [None if item.words is None else [*map(str, item.words)] for item in checkpoint.schedules],
        "every": [item.every for item in checkpoint.schedules],
        "clip": checkpoint.clip and dict(checkpoint.clip),
        "accumulate": checkpoint.accumulate,
    }


def with_words(checkpoint: Checkpoint, words: Any) -> Checkpoint:
    """Return a checkpoint with a recipe's options that were stored beside it.

    Stored groups replace its groups if they have the same parameters.
    """
    if not words or len(checkpoint.optimizers) != 1:
        return checkpoint
    (optimizer,) = checkpoint.optimizers
    with blame_file(f"the options of the optimizer in `{checkpoint.path}` cannot be read", *SENSELESS):
        stored_groups = [
            (parse(str(group["optimizer"])), tuple(map(str, group["parameters"]))) for group in words["groups"]
        ]
        schedules = [None if item is None else tuple(parse(str(spec)) for spec in item) for item in words["schedules"]]
        units = [None if item is None else int(item) for item in words.get("every") or [None] * len(schedules)]
        clip = words["clip"] and dict(words["clip"])
        accumulate = None if words.get("accumulate") is None else int(words["accumulate"])
    stored = {name: group for group in optimizer.groups for name in group.parameters}
    if {*stored} != {name for _, names in stored_groups for name in names}:
        return checkpoint
    # The state of optax does not distinguish groups without state, such as several of SGD.
    groups = [dataclasses.replace(stored[n[0]], parameters=n, optimizer=spec) for spec, n in stored_groups if n]
    families = dict.fromkeys(spec.name for spec, names in stored_groups if names)
    updated = []
    for item, spec_words, every in zip(checkpoint.schedules, schedules or [()], units or [None], strict=False):
        position = item.position
        if position is not None and every is not None and every > 1:
            position //= every  # optax counts updates
        updated.append(dataclasses.replace(item, words=spec_words, every=every or item.every, position=position))
    return dataclasses.replace(
        checkpoint,
        optimizers=(dataclasses.replace(optimizer, groups=tuple(groups), families=tuple(families)),),
        schedules=tuple(updated) or checkpoint.schedules,
        clip=clip,
        accumulate=accumulate if checkpoint.accumulate is None else accumulate or checkpoint.accumulate,
    )
