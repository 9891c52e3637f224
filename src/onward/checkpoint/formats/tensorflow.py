"""Checkpoints of TensorFlow: alone, in the folder of a manager, or in a SavedModel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.tf.keras_training import in_place_of
from onward.checkpoint.tf.object_graph import SHARED, OptimizerKeys, meaning_of
from onward.checkpoint.tf.tensor_bundle import GRAPH, INDEX, Tree, names_in, read_bundle, write_bundle
from onward.errors import InvalidModelError, UnsupportedError, list_names
from onward.model.storage.files import blame_file, regular
from onward.run_state.state import COUNT, MASTER, OptimizerState, ParameterGroup, RandomState, SchedulerState
from onward.run_state.tensors import ArrayTensor, Tensor, convert_dtype, number_of
from onward.vocabulary.keras import shortest_decimal, snake_case
from onward.vocabulary.optimizers import KERAS_ROWS

_STATE = "checkpoint"
"""File that names the newest checkpoint of a folder."""
_LONGEST_STATE = 1 << 24
_VARIABLES = "variables/variables"


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
        raise InvalidModelError(f"`{path / _STATE}` names `{newest}` as the newest, which is missing")
    if len(names) > 1:
        raise UnsupportedError(
            f"`{path}` has several checkpoints, and no file `{_STATE}` that names the newest",
            hint=f"give one of them: {list_names(tuple(name + INDEX for name in names), 6)}",
        )
    return path / names[0]


def _newest(path: Path) -> str:
    """Return the name of the newest checkpoint, without its folder."""
    if not path.is_file():
        return ""
    with blame_file(f"cannot read `{path}`"):
        if regular(path).st_size > _LONGEST_STATE:
            raise ValueError("it is too large")
        match = re.search(r'^model_checkpoint_path: *"((?:[^"\\]|\\.)*)"', path.read_text("utf-8"), re.MULTILINE)
    return match[1].replace("\\\\", "/").rpartition("/")[2] if match else ""


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
        schedules=tuple(  # constant for a stored rate: TensorFlow stores nothing of others
            SchedulerState({}, () if "lr" in settings else None, settings.get("iterations"), every=1)
            for settings in (optimizer.groups[0].settings for optimizer in optimizers)
        ),
        step=int(max(steps)) if steps else None,
        progress=progress,
        randomness=tuple(RandomState("TensorFlow", tree[key]) for key in meaning.generators.values()),
        data={name: tree[key] for name, key in meaning.data.items()},
        averages=averages,
        files=tuple(name + INDEX for name in names_in(prefix.parent) if name != prefix.name),
        trees={prefix.name + INDEX: tree},
        remarks=("the averages may be the weights: Keras's `fit` overwrites weights at its end",) if averages else (),
    )


def _optimizer(keys: OptimizerKeys, tree: Tree) -> OptimizerState:
    product = keys.numbers.get("u_product")
    shared = {SHARED: convert_dtype(_tensor(tree, product), np.dtype(np.float64))} if product else {}
    slots: dict[Any, dict[str, Any]] = {
        name: {**{slot: _tensor(tree, key) for slot, key in slot_keys.items()}, **shared}
        for name, slot_keys in keys.slots.items()
    }
    settings = {name: number_of(tree[key]) for name, key in keys.numbers.items() if name != "u_product"}
    if "learning_rate" in settings:
        settings["lr"] = shortest_decimal(settings.pop("learning_rate"))
    numbers = {"lr": settings["lr"]} if "lr" in settings else {}
    group = ParameterGroup(None, tuple(keys.parameters), settings, numbers=numbers)
    return OptimizerState(keys.families, (group,), slots, variant="keras")


def _tensor(tree: Tree, key: str) -> Tensor:
    tensor = tree[key]
    if not isinstance(tensor, Tensor):
        raise InvalidModelError(f"`{key}` of the checkpoint is not a tensor")
    return tensor


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Write a folder with one checkpoint.

    One that came from TensorFlow keeps its keys and objects. Others have names of variables as
    keys, which TensorFlow restores for any object.
    """
    tree = next((tree for name, tree in checkpoint.trees.items() if name.endswith(INDEX)), None)
    variables = _named_variables(checkpoint) if tree is None else _renew_tree(tree, checkpoint)
    path.mkdir(parents=True, exist_ok=True)
    name = f"ckpt-{checkpoint.step or 1}"
    write_bundle(path / name, variables)
    (path / _STATE).write_text(f'model_checkpoint_path: "{name}"\nall_model_checkpoint_paths: "{name}"\n', "utf-8")


def _renew_tree(tree: Tree, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the original tree with the numbers of the checkpoint."""
    meaning, renewed = meaning_of(tree), dict(tree)
    for name, key in meaning.parameters.items():
        renewed[key] = in_place_of(tree[key], checkpoint.tensors.get(name), name)
    for name, key in meaning.counters.items():
        if isinstance(count := checkpoint.progress.get(name), int):
            _put(renewed, key, count)
    for keys, optimizer in zip(meaning.optimizers, checkpoint.optimizers, strict=False):
        for name, slots in keys.slots.items():
            for slot, key in slots.items():
                renewed[key] = in_place_of(tree[key], optimizer.slots.get(name, {}).get(slot), f"{name}/{slot}")
        for name, key in keys.averages.items():
            renewed[key] = in_place_of(tree[key], checkpoint.averages.get(name), f"the average of {name}")
        products = [slots[SHARED] for slots in optimizer.slots.values() if SHARED in slots]
        numbers = {
            "iterations": checkpoint.step,
            "u_product": number_of(products[0]) if products else None,
            "learning_rate": optimizer.groups[0].rate if optimizer.groups else None,
        }
        for name, number in numbers.items():
            if name in keys.numbers and number is not None:
                _put(renewed, keys.numbers[name], number)
    return renewed


def _put(tree: dict[str, Any], key: str, number: float) -> None:
    tree[key] = ArrayTensor(np.asarray(number, tree[key].dtype))


def _named_variables(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return variables by name. Optimizer state has the names of Keras."""
    variables: dict[str, Any] = dict(checkpoint.tensors)
    for optimizer in checkpoint.optimizers:
        variables |= {str(name): slots[MASTER] for name, slots in optimizer.slots.items() if MASTER in slots}
        row = next((row for row in KERAS_ROWS.values() if optimizer.families == row.optimizers[:1]), None)
        owner, words = (snake_case(row.name), row.words) if row else ("optimizer", {})
        for name, slots in optimizer.slots.items():
            for slot, value in slots.items():
                if isinstance(value, Tensor) and slot not in (COUNT, MASTER):
                    flat_name = str(name).replace("/", "_")
                    key = f"{owner}/{flat_name}_{words[slot]}" if slot in words else f"{name}/{slot}"
                    variables[key] = value
        if checkpoint.step is not None:
            variables[f"{owner}/iteration"] = ArrayTensor(np.asarray(checkpoint.step, np.int64))
    variables |= {f"{name}/ExponentialMovingAverage": tensor for name, tensor in checkpoint.averages.items()}
    if not checkpoint.optimizers and checkpoint.step is not None:
        variables["global_step"] = ArrayTensor(np.asarray(checkpoint.step, np.int64))
    return variables


FORMAT = Format(
    "tensorflow", "TensorFlow", matches, read, write,
    keeps=("tensors", "optimizers", "step", "progress", "randomness", "data", "averages"),
)  # fmt: skip
