"""Trees of JAX as checkpoints, both ways: parameters, states of optax, counters, random keys."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytree import DATA, KEY, KeyPath, at, leaves, map_leaves, names_of_tensors, nest_names, parts
from onward.checkpoint.pytree.optax_states import (
    FAMILIES,
    LARGEST,
    SECOND,
    States,
    factors,
    optimizer_state,
    unwrap_variable,
    with_sign,
)
from onward.errors import UnsupportedError, list_names
from onward.run_state.state import COUNT, MASTER, OptimizerState, ParameterGroup, RandomState, SchedulerState
from onward.run_state.tensors import ArrayTensor, ComputedTensor, Tensor
from onward.vocabulary.optax import SETTINGS

_PARAMETERS = ("params", "parameters", "model_params")
_MODEL = ("model", "weights")
"""Names of parameters beside an optimizer; elsewhere they are names of layers."""
_STATISTICS = ("batch_stats", "statistics", "model_state")
_AVERAGES = ("ema", "ema_params", "params_ema")
OPTIMIZER = ("opt_state", "optimizer_state", "optimizer")
_STEP = ("step", "global_step", "iteration")
_RANDOM = {
    "rng", "rngs", "random", "key", "keys", "prng", "prng_key", "rng_key", "dropout_rng", "dropout_key",
    "jax_random_key",
}  # fmt: skip
INFORMATION = "_CHECKPOINT_METADATA"
"""File of Orbax without a tree."""
_DEEPEST = 3
"""Depth below the top to which these names are searched."""


@dataclasses.dataclass
class TreeMeaning:
    """Paths of a tree, by what they hold."""

    parameters: dict[KeyPath, str] = dataclasses.field(default_factory=dict)
    statistics: dict[KeyPath, str] = dataclasses.field(default_factory=dict)
    averages: dict[KeyPath, str] = dataclasses.field(default_factory=dict)
    states: States | None = None
    step: KeyPath | None = None
    random: list[KeyPath] = dataclasses.field(default_factory=list)

    @property
    def counters(self) -> list[KeyPath]:
        """Return all counters of updates."""
        return [*([self.step] if self.step else []), *(self.states.counts if self.states else [])]


def meaning_of(tree: Any) -> TreeMeaning:
    """Return the meaning of paths by common names. Without `params`, all tensors are parameters."""
    meaning = TreeMeaning(random=_random_keys(tree))
    optimizer = find(tree, OPTIMIZER, ())
    taken = [optimizer] if optimizer else []
    root = find(tree, (*_PARAMETERS, *(_MODEL if optimizer else ())), taken)
    if root:
        taken.append(root)
        meaning.parameters = names_of_tensors(at(tree, root), root)
    for names, named in ((_STATISTICS, meaning.statistics), (_AVERAGES, meaning.averages)):
        if path := find(tree, names, taken):
            taken.append(path)
            named |= names_of_tensors(at(tree, path), path)
    if path := find(tree, _STEP, taken):
        path = unwrap_variable(at(tree, path), path)
        meaning.step = path if number(at(tree, path)) is not None else None
    if not root:
        others = {path[0] for path in [*taken, *([meaning.step] if meaning.step else [])]}
        meaning.parameters = names_of_tensors({key: child for key, child in parts(tree) if key not in others})
    if optimizer:
        meaning.states = States()
        meaning.states.read(at(tree, optimizer), optimizer)
    for paths in (meaning.parameters, meaning.statistics):
        for path in paths.keys() & set(meaning.random):
            del paths[path]
    return meaning


def find(tree: Any, names: Iterable[str], without: Iterable[KeyPath]) -> KeyPath | None:
    """Return the outermost path that ends in the first of these names."""
    for name in names:
        level: list[tuple[KeyPath, Any]] = [((), tree)]
        for _ in range(_DEEPEST):
            level = [((*path, key), child) for path, node in level for key, child in parts(node)]
            level = [(path, child) for path, child in level if path not in without]
            if match := next((path for path, _ in level if path[-1] == name), None):
                return match
    return None


def _random_keys(tree: Any) -> list[KeyPath]:
    """Return the paths of random keys: typed ones, and raw ones by their names."""
    flat = dict(leaves(tree))
    typed = [(*path[:-1], DATA) for path in flat if path[-1:] == (KEY,)]
    raw = [
        path
        for path, leaf in flat.items()
        if isinstance(leaf, Tensor) and leaf.dtype == np.uint32 and leaf.shape[-1:] in ((), (2,), (4,))
        if not _RANDOM.isdisjoint(path)
    ]
    return [path for path in typed if path in flat] + [path for path in raw if path not in typed]


def number(leaf: Any) -> int | None:
    """Return the value of a counter, or None."""
    if isinstance(leaf, Tensor) and not leaf.shape and leaf.dtype.kind in "iu":
        return int(leaf.array().item())
    return int(leaf) if isinstance(leaf, int | np.integer) and not isinstance(leaf, bool) else None


def checkpoint_of_tree(path: Path, format: str, title: str, tree: Any, **facts: Any) -> Checkpoint:
    """Return the checkpoint in a tree. `facts` are fields that are known already."""
    meaning, flat = meaning_of(tree), dict(leaves(tree))
    tensors = {name: flat[leaf_path] for leaf_path, name in (meaning.parameters | meaning.statistics).items()}
    step, counted = updates_made(meaning, flat), number(flat[meaning.step]) if meaning.step else None
    keys = [leaf_path[:-1] if leaf_path[-1] == DATA else leaf_path for leaf_path in meaning.random]
    fields: dict[str, Any] = {
        "step": step,
        "progress": {} if counted is None else {"step": counted},
        "randomness": tuple(RandomState("jax", at(tree, leaf_path)) for leaf_path in keys),
        "averages": {name: flat[leaf_path] for leaf_path, name in meaning.averages.items()},
        **facts,
    }
    if meaning.states:
        trained = {name: tensors[name] for name in meaning.parameters.values() if tensors[name].dtype.kind not in "biu"}
        fields["optimizers"] = (_optimizer(meaning.states, flat, trained, step),)
        schedule = SchedulerState({}, (), step, every=1)
        if meaning.states.schedules:  # whose shape is not stored
            position = max((number(flat[leaf_path]) or 0) for leaf_path in meaning.states.schedules)
            schedule = SchedulerState({"count": position}, None, position, every=1)
        fields["schedules"] = (schedule,)
        fields["waiting"] = (number(flat[meaning.states.waiting]) or 0) if meaning.states.waiting else 0
        # `MultiSteps` does not store its `every_k_schedule`.
        fields["accumulate"] = 0 if meaning.states.waiting else None
        fields["remarks"] = (*fields.get("remarks", ()), *_remarks(meaning.states, flat))
    return Checkpoint(path=path, format=format, title=title, tensors=tensors, **fields)


def updates_made(meaning: TreeMeaning, flat: Mapping[KeyPath, Any]) -> int | None:
    """Return the updates made: of the optimizer, else of the training, which may count batches."""
    counted = [number(flat[path]) for path in (meaning.states.counts if meaning.states else ())]
    counts = [count for count in counted if count is not None]
    return max(counts) if counts else number(flat[meaning.step]) if meaning.step else None


def _optimizer(
    states: States, flat: Mapping[KeyPath, Any], trained: Mapping[str, Tensor], step: int | None
) -> OptimizerState:
    slots: dict[str | int, dict[str, Any]] = {}
    for path, (name, slot, sign) in states.slots.items():
        slots.setdefault(name, {})[slot] = with_sign(flat[path], sign)
    slot_names = {frozenset(values) for values in slots.values()} or {frozenset[str]()}
    families = FAMILIES.get(slot_names.pop(), ()) if len(slot_names) == 1 else ()
    if "adafactor" in families:
        slots = {name: factors(values, trained[str(name)].shape) for name, values in slots.items() if name in trained}
    if step is not None:
        slots = {name: {**values, COUNT: step} for name, values in slots.items()}
    return OptimizerState(families, _groups(states, flat, [*trained]), slots, variant="optax")


def _groups(states: States, flat: Mapping[KeyPath, Any], trained: list[str]) -> tuple[ParameterGroup, ...]:
    """Return parameters by their label, as far as their state tells it."""
    members = {label: [name for name in trained if name in names] for label, names in states.members.items()}
    left = [name for name in trained if not any(name in names for names in members.values())]
    silent = [label for label, names in members.items() if not names]
    if left:
        members.setdefault(silent[0] if len(silent) == 1 else "", []).extend(left)
    groups = []
    for label, names in members.items():
        settings = {}
        for name, path in states.settings.get(label, states.settings.get("", {})).items():
            leaf = flat[path]
            settings[name] = leaf.array().item() if isinstance(leaf, Tensor) and not leaf.shape else leaf
        numbers = {SETTINGS.get(name, name): x for name, x in settings.items() if isinstance(x, int | float)}
        if states.schedules:
            numbers.pop("lr", None)  # the current rate, not the base rate of the schedule
        groups += [ParameterGroup(None, tuple(names), settings, numbers=numbers)] if names else []
    return tuple(groups)


def _remarks(states: States, flat: Mapping[KeyPath, Any]) -> list[str]:
    remarks = []
    counts = sorted({count for path in states.counts if (count := number(flat[path])) is not None})
    if len(counts) > 1:
        remarks.append(f"parts of the optimizer made different numbers of updates: {', '.join(map(str, counts))}")
    if states.waiting and (waiting := number(flat[states.waiting])):
        remarks.append(f"gradients of {waiting} batches wait for an update, and are lost in other formats")
    if states.unknown:
        names = ["/".join(path) for path in states.unknown]
        remarks.append(f"the kind of the optimizer state {list_names(names, 3)} is unknown")
    return remarks


LEAVES = "equinox"
"""Format of leaves without names."""


def with_names_of(checkpoint: Checkpoint, model: Checkpoint) -> Checkpoint:
    """Return a checkpoint of leaves with the names of a model, which has them in the same order.

    Numbers such as the rate of a Dropout are leaves, too; the model does not have these.
    """
    pending = iter(checkpoint.tensors.values())

    def next_leaf(path: KeyPath, expected: Any) -> Any:
        if not isinstance(expected, Tensor):
            return expected
        tensor = next(pending)
        while not tensor.shape and (expected.shape or tensor.dtype.kind != expected.dtype.kind):
            tensor = next(pending)
        if tensor.shape != expected.shape:
            raise UnsupportedError(
                f"a leaf is {list(tensor.shape)}, and `{'/'.join(path)}` is {list(expected.shape)}",
                hint="give the training model of the same module and optimizer",
            )
        return tensor

    tree: dict[str, Any] = {}
    for key, part in new_tree(dataclasses.replace(model, averages={}), {}).items():
        with contextlib.suppress(StopIteration):  # the file may hold the module alone
            tree |= {key: map_leaves(part, next_leaf, (key,))} if key != "step" else {}
    if left := [list(tensor.shape) for tensor in pending if tensor.shape]:
        raise UnsupportedError(
            f"`{checkpoint.path}` has {len(left)} more leaves than the model",
            hint="give a training model with the same optimizer: `--like training.onnx`",
        )
    return checkpoint_of_tree(
        checkpoint.path, checkpoint.format, checkpoint.title, tree, trees={checkpoint.path.name: tree}
    )


# ---- writing ---------------------------------------------------------------------------------------------------------

_TREES: dict[str, Any] = {"orbax": None, "flax": {}}
"""Formats of trees -> their form of a state of optax without fields."""


def tree_of(checkpoint: Checkpoint, empty: Any) -> Any:
    """Return the tree to write: the original one with current numbers, or a new one.

    `empty` is the form of a state of optax without fields.
    """
    original = None
    if checkpoint.format in _TREES:
        items = {name: tree for name, tree in checkpoint.trees.items() if name != INFORMATION}
        original = next(iter(items.values())) if len(items) == 1 else items or None
    if original is None or not set(meaning_of(original).parameters.values()) <= checkpoint.tensors.keys():
        return new_tree(checkpoint, empty)
    tree, stored_as = update_tree(original, checkpoint), _TREES[checkpoint.format]
    optimizer_path = find(original, OPTIMIZER, ())
    if stored_as == empty or optimizer_path is None:
        return tree
    depth = len(optimizer_path)
    return map_leaves(tree, lambda path, leaf: empty if path[:depth] == optimizer_path and leaf == stored_as else leaf)


def update_tree(tree: Any, checkpoint: Checkpoint) -> Any:
    """Return a tree with the current numbers of a checkpoint; other leaves are unchanged."""
    meaning, flat = meaning_of(tree), dict(leaves(tree))
    new: dict[KeyPath, Any] = {}
    for paths, tensors in (
        (meaning.parameters | meaning.statistics, checkpoint.tensors),
        (meaning.averages, checkpoint.averages),
    ):
        new |= {path: _like(flat[path], tensors[name]) for path, name in paths.items() if name in tensors}
    counts = {path: count for path in meaning.counters if (count := number(flat[path])) is not None}
    before = updates_made(meaning, flat)
    passed = 0 if checkpoint.step is None or before is None else checkpoint.step - before
    for path, count in counts.items():
        unit = count // before if before and count % before == 0 and count else 1  # batches per update
        new[path] = _counter(flat[path], count + passed * unit)
    if meaning.states and checkpoint.optimizers:
        slots = checkpoint.optimizers[0].slots
        for path, (name, slot, sign) in meaning.states.slots.items():
            values = slots.get(name, {})
            slot = LARGEST if slot == SECOND and LARGEST in values else slot
            if slot in values:
                new[path] = _like(flat[path], with_sign(values[slot], sign))
        if passed and meaning.states.waiting:
            new |= {path: _zeros(flat[path]) for path in [meaning.states.waiting, *meaning.states.accumulated]}
    return map_leaves(tree, lambda path, leaf: new.get(path, leaf))


def _like(old: Tensor, new: Tensor) -> Tensor:
    """Return a tensor in the shape and dtype of the original."""
    if math.prod(old.shape) != math.prod(new.shape):
        raise UnsupportedError(
            f"a tensor of {list(old.shape)} became {list(new.shape)}, which does not fit the tree",
            hint="write the checkpoint without changing shapes",
        )
    if old.shape == new.shape and old.dtype == new.dtype:
        return new
    return ComputedTensor(old.dtype, old.shape, lambda: new.array().reshape(old.shape).astype(old.dtype))


def _counter(old: Any, count: int) -> Any:
    if isinstance(old, Tensor):
        return ArrayTensor(np.asarray(count, old.dtype))
    return old.dtype.type(count) if isinstance(old, np.generic) else count


def _zeros(old: Any) -> Any:
    return ArrayTensor(np.zeros(old.shape, old.dtype)) if isinstance(old, Tensor) else _counter(old, 0)


def new_tree(checkpoint: Checkpoint, empty: Any) -> dict[str, Any]:
    """Return a tree for a checkpoint of another framework, in the form of Flax's `TrainState`."""
    masters = {name: value for name, slot, value in checkpoint.stored_slots if slot == MASTER}
    trained = {name for group in checkpoint.stored_groups for name in group.parameters}
    tensors = {name: masters.get(name, tensor) for name, tensor in checkpoint.tensors.items()}
    others = {name: tensor for name, tensor in tensors.items() if trained and name not in trained}
    tree = {"step": checkpoint.step or 0, "params": nest_names({k: v for k, v in tensors.items() if k not in others})}
    if checkpoint.optimizers:
        tree["opt_state"] = optimizer_state(checkpoint, empty)
    if others:
        tree["batch_stats"] = nest_names(others)
    if checkpoint.averages:
        tree["ema"] = nest_names(checkpoint.averages)
    return tree
