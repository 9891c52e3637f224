"""Checkpoints of TensorFlow: an index and files of data, alone, in the folder of a manager, or in a SavedModel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.tf.bundles import GRAPH, INDEX, Tree, names_in, read_bundle, write_bundle
from onward.checkpoint.tf.fitted import in_place_of
from onward.checkpoint.tf.tracked import SHARED, Keys, meaning_of
from onward.errors import InvalidModelError, UnsupportedError, list_names
from onward.model.storage.files import blame_file, regular
from onward.run_state.state import COUNT, MASTER, OptimizerState, ParameterGroup, RandomState, SchedulerState
from onward.run_state.tensors import ArrayTensor, Tensor, convert_dtype, number_of
from onward.vocabulary.keras import shortest_decimal, snake_case
from onward.vocabulary.optimizers import KERAS_ROWS

_STATE = "checkpoint"
"""The file that says which checkpoint of a folder is the newest."""
_LONGEST_STATE = 1 << 24
_VARIABLES = "variables/variables"


# ---- where it is -----------------------------------------------------------------------------------------------------


def matches(path: Path) -> bool:
    if path.is_dir():
        return (path / f"{_VARIABLES}{INDEX}").is_file() or any(names_in(path))
    return path.name.endswith(INDEX) and path.is_file()


def _prefix(path: Path) -> Path:
    if not path.is_dir():
        return path.with_name(path.name.removesuffix(INDEX))
    if (path / f"{_VARIABLES}{INDEX}").is_file():
        return path / _VARIABLES
    names = list(names_in(path))
    newest = _newest(path / _STATE)
    if newest in names:
        return path / newest
    if newest:
        raise InvalidModelError(f"`{path / _STATE}` says that `{newest}` is the newest, which is not there")
    if len(names) > 1:
        raise UnsupportedError(
            f"`{path}` has several checkpoints, and no file `{_STATE}` that says which is the newest",
            hint=f"give one of them: {list_names(tuple(name + INDEX for name in names), 6)}",
        )
    return path / names[0]


def _newest(path: Path) -> str:
    """The name of a checkpoint in the same folder, whatever the path was when it was written."""
    if not path.is_file():
        return ""
    with blame_file(f"cannot read `{path}`"):
        if regular(path).st_size > _LONGEST_STATE:
            raise ValueError("it is too long")
        found = re.search(r'^model_checkpoint_path: *"((?:[^"\\]|\\.)*)"', path.read_text("utf-8"), re.MULTILINE)
    return found[1].replace("\\\\", "/").rpartition("/")[2] if found else ""


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> Checkpoint:
    prefix = _prefix(path)
    tree = read_bundle(prefix)
    meaning = meaning_of(tree)
    optimizers = tuple(_optimizer(keys, tree) for keys in meaning.optimizers)
    progress = {name: number_of(tree[key]) for name, key in meaning.counters.items()}
    steps = [number_of(tree[keys.numbers["iterations"]]) for keys in meaning.optimizers if "iterations" in keys.numbers]
    steps += [progress[name] for name in ("step", "global_step") if name in progress]
    averages = {name: tree[key] for keys in meaning.optimizers for name, key in keys.averages.items()}
    return Checkpoint(
        path=path,
        format=FORMAT.name,
        title=FORMAT.title if GRAPH in tree else f"{FORMAT.title}, by the names of variables",
        tensors={name: tree[key] for name, key in meaning.parameters.items()},
        optimizers=optimizers,
        schedules=tuple(map(_schedule, optimizers)),
        step=int(max(steps)) if steps else None,
        progress=progress,
        randomness=tuple(RandomState("TensorFlow", tree[key]) for key in meaning.generators.values()),
        data={name: tree[key] for name, key in meaning.data.items()},
        averages=averages,
        files=tuple(name + INDEX for name in names_in(prefix.parent) if name != prefix.name),
        trees={prefix.name + INDEX: tree},
        remarks=("the averages may be the weights: Keras's `fit` overwrites them at its end",) if averages else (),
    )


def _optimizer(keys: Keys, tree: Tree) -> OptimizerState:
    product = keys.numbers.get("u_product")
    shared = {SHARED: convert_dtype(_tensor(tree, product), np.dtype(np.float64))} if product else {}
    slots: dict[Any, dict[str, Any]] = {
        name: {**{slot: _tensor(tree, key) for slot, key in kept.items()}, **shared}
        for name, kept in keys.slots.items()
    }
    settings = {name: number_of(tree[key]) for name, key in keys.numbers.items() if name != "u_product"}
    if "learning_rate" in settings:
        settings["lr"] = shortest_decimal(settings.pop("learning_rate"))
    numbers = {"lr": settings["lr"]} if "lr" in settings else {}
    group = ParameterGroup(None, tuple(keys.parameters), settings, numbers=numbers)
    return OptimizerState(keys.families, (group,), slots, variant="keras")


def _schedule(optimizer: OptimizerState) -> SchedulerState:
    """A rate that is stored is constant; of a schedule, nothing is."""
    settings = optimizer.groups[0].settings
    return SchedulerState({}, () if "lr" in settings else None, settings.get("iterations"), every=1)


def _tensor(tree: Tree, key: str) -> Tensor:
    found = tree[key]
    if not isinstance(found, Tensor):
        raise InvalidModelError(f"`{key}` of the checkpoint is no tensor")
    return found


# ---- writing ---------------------------------------------------------------------------------------------------------


def write(checkpoint: Checkpoint, path: Path) -> None:
    """A folder with one checkpoint.

    One that came from TensorFlow has the same keys and objects as it had. One of another origin has the names of its
    variables as keys; TensorFlow restores variables with these names, whatever object holds them.
    """
    tree = next((tree for name, tree in checkpoint.trees.items() if name.endswith(INDEX)), None)
    made = _named_variables(checkpoint) if tree is None else _renew_tree(tree, checkpoint)
    path.mkdir(parents=True, exist_ok=True)
    name = f"ckpt-{checkpoint.step or 1}"
    write_bundle(path / name, made)
    (path / _STATE).write_text(f'model_checkpoint_path: "{name}"\nall_model_checkpoint_paths: "{name}"\n', "utf-8")


def _renew_tree(tree: Tree, checkpoint: Checkpoint) -> dict[str, Any]:
    """The tree with all that the checkpoint knows in its place."""
    meaning, made = meaning_of(tree), dict(tree)
    for name, key in meaning.parameters.items():
        made[key] = in_place_of(tree[key], checkpoint.tensors.get(name), name)
    for name, key in meaning.counters.items():
        if isinstance(now := checkpoint.progress.get(name), int):
            _put(made, key, now)
    for keys, optimizer in zip(meaning.optimizers, checkpoint.optimizers, strict=False):
        for name, slots in keys.slots.items():
            for slot, key in slots.items():
                made[key] = in_place_of(tree[key], optimizer.slots.get(name, {}).get(slot), f"{name}/{slot}")
        for name, key in keys.averages.items():
            made[key] = in_place_of(tree[key], checkpoint.averages.get(name), f"the average of {name}")
        _renew_numbers(made, keys, optimizer, checkpoint.step)
    return made


def _renew_numbers(made: dict[str, Any], keys: Keys, optimizer: OptimizerState, step: int | None) -> None:
    if step is not None and "iterations" in keys.numbers:
        _put(made, keys.numbers["iterations"], step)
    shared = [slots[SHARED] for slots in optimizer.slots.values() if SHARED in slots]
    if "u_product" in keys.numbers and shared:
        _put(made, keys.numbers["u_product"], number_of(shared[0]))
    rate = optimizer.groups[0].rate if optimizer.groups else None
    if "learning_rate" in keys.numbers and rate is not None:
        _put(made, keys.numbers["learning_rate"], rate)


def _put(made: dict[str, Any], key: str, number: float) -> None:
    made[key] = ArrayTensor(np.asarray(number, made[key].dtype))


def _named_variables(checkpoint: Checkpoint) -> dict[str, Any]:
    """Variables by name. What optimizers keep has the names that Keras would give it."""
    made: dict[str, Any] = dict(checkpoint.tensors)
    for optimizer in checkpoint.optimizers:
        made |= {str(name): slots[MASTER] for name, slots in optimizer.slots.items() if MASTER in slots}
        row = next((row for row in KERAS_ROWS.values() if optimizer.families == row.optimizers[:1]), None)
        owner, words = (snake_case(row.name), row.words) if row else ("optimizer", {})
        for name, slots in optimizer.slots.items():
            for slot, value in slots.items():
                called = f"{owner}/{str(name).replace('/', '_')}_{words[slot]}" if slot in words else f"{name}/{slot}"
                if isinstance(value, Tensor) and slot not in (COUNT, MASTER):
                    made[called] = value
        if checkpoint.step is not None:
            made[f"{owner}/iteration"] = ArrayTensor(np.asarray(checkpoint.step, np.int64))
    made |= {f"{name}/ExponentialMovingAverage": tensor for name, tensor in checkpoint.averages.items()}
    if not checkpoint.optimizers and checkpoint.step is not None:
        made["global_step"] = ArrayTensor(np.asarray(checkpoint.step, np.int64))
    return made


FORMAT = Format(
    "tensorflow",
    "TensorFlow",
    matches,
    read,
    write,
    keeps=("tensors", "optimizers", "step", "progress", "randomness", "data", "averages"),
)
