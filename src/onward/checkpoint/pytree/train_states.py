"""Trees of JAX as checkpoints, and back: parameters, states of optax, counters, keys of random numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytree import DATA, KEY, Way, at, leaves, map_leaves, names_of_tensors, nest_names, parts
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
"""What parameters may be called as well beside an optimizer: alone, it is the name of a layer."""
_STATISTICS = ("batch_stats", "statistics", "model_state")
_AVERAGES = ("ema", "ema_params", "params_ema")
OPTIMIZER = ("opt_state", "optimizer_state", "optimizer")
_STEP = ("step", "global_step", "iteration")
_RANDOM = {
    "rng", "rngs", "random", "key", "keys", "prng", "prng_key", "rng_key", "dropout_rng", "dropout_key",
    "jax_random_key",
}  # fmt: skip
INFORMATION = "_CHECKPOINT_METADATA"
"""What is no tree among those of Orbax."""
_DEEPEST = 3
"""How far below the top these are looked for."""


@dataclasses.dataclass
class TreeMeaning:
    """What the places of a tree are."""

    parameters: dict[Way, str] = dataclasses.field(default_factory=dict)
    statistics: dict[Way, str] = dataclasses.field(default_factory=dict)
    averages: dict[Way, str] = dataclasses.field(default_factory=dict)
    states: States | None = None
    step: Way | None = None
    random: list[Way] = dataclasses.field(default_factory=list)

    @property
    def counters(self) -> list[Way]:
        """All that counts updates."""
        return [*([self.step] if self.step else []), *(self.states.counts if self.states else [])]


def meaning_of(tree: Any) -> TreeMeaning:
    """What is where, by the names that trainings use. Where nothing is called parameters, all tensors are."""
    found = TreeMeaning(random=_keys(tree))
    optimizer = find(tree, OPTIMIZER, ())
    taken = [optimizer] if optimizer else []
    root = find(tree, (*_PARAMETERS, *(_MODEL if optimizer else ())), taken)
    if root:
        taken.append(root)
        found.parameters = names_of_tensors(at(tree, root), root)
    for names, places in ((_STATISTICS, found.statistics), (_AVERAGES, found.averages)):
        if way := find(tree, names, taken):
            taken.append(way)
            places |= names_of_tensors(at(tree, way), way)
    if way := find(tree, _STEP, taken):
        way = unwrap_variable(at(tree, way), way)
        found.step = way if number(at(tree, way)) is not None else None
    if not root:
        others = {way[0] for way in [*taken, *([found.step] if found.step else [])]}
        found.parameters = names_of_tensors({key: part for key, part in parts(tree) if key not in others})
    if optimizer:
        found.states = States()
        found.states.read(at(tree, optimizer), optimizer)
    for each in (found.parameters, found.statistics):
        for way in each.keys() & set(found.random):
            del each[way]
    return found


def find(tree: Any, names: Iterable[str], without: Iterable[Way]) -> Way | None:
    """The outermost place that has the first of these names."""
    for name in names:
        level: list[tuple[Way, Any]] = [((), tree)]
        for _ in range(_DEEPEST):
            level = [((*way, key), part) for way, inside in level for key, part in parts(inside)]
            level = [(way, part) for way, part in level if way not in without]
            if found := next((way for way, _ in level if way[-1] == name), None):
                return found
    return None


def _keys(tree: Any) -> list[Way]:
    """What is the state of random numbers, and no parameter: typed keys, and raw ones by their names."""
    flat = dict(leaves(tree))
    typed = [(*way[:-1], DATA) for way in flat if way[-1:] == (KEY,)]
    raw = [
        way
        for way, leaf in flat.items()
        if isinstance(leaf, Tensor) and leaf.dtype == np.uint32 and leaf.shape[-1:] in ((), (2,), (4,))
        if not _RANDOM.isdisjoint(way)
    ]
    return [way for way in typed if way in flat] + [way for way in raw if way not in typed]


def number(leaf: Any) -> int | None:
    """A counter."""
    if isinstance(leaf, Tensor) and not leaf.shape and leaf.dtype.kind in "iu":
        return int(leaf.array().item())
    is_whole = isinstance(leaf, int | np.integer) and not isinstance(leaf, bool)
    return int(leaf) if is_whole else None


def checkpoint_of_tree(path: Path, format: str, title: str, tree: Any, **facts: Any) -> Checkpoint:
    """What is in a tree. `facts` are fields of the checkpoint that are known already."""
    meaning, flat = meaning_of(tree), dict(leaves(tree))
    tensors = {name: flat[way] for way, name in (meaning.parameters | meaning.statistics).items()}
    step, counted = updates_made(meaning, flat), number(flat[meaning.step]) if meaning.step else None
    keys = [way[:-1] if way[-1] == DATA else way for way in meaning.random]
    known: dict[str, Any] = {
        "step": step,
        "progress": {name: count for name, count in (("step", counted),) if count is not None},
        "randomness": tuple(RandomState("jax", at(tree, way)) for way in keys),
        "averages": {name: flat[way] for way, name in meaning.averages.items()},
        **facts,
    }
    if meaning.states:
        trained = {name: tensors[name] for name in meaning.parameters.values() if tensors[name].dtype.kind not in "biu"}
        known["optimizers"] = (_optimizer(meaning.states, flat, trained, step),)
        schedule = SchedulerState({}, (), step, every=1)
        if meaning.states.schedules:  # whose shape is not stored
            position = max((number(flat[way]) or 0) for way in meaning.states.schedules)
            schedule = SchedulerState({"count": position}, None, position, every=1)
        known["schedules"] = (schedule,)
        known["waiting"] = (number(flat[meaning.states.waiting]) or 0) if meaning.states.waiting else 0
        known["accumulate"] = (
            0 if meaning.states.waiting else None
        )  # `MultiSteps` does not store its `every_k_schedule`
        known["remarks"] = (*known.get("remarks", ()), *_remarks(meaning.states, flat))
    return Checkpoint(path=path, format=format, title=title, tensors=tensors, **known)


def updates_made(meaning: TreeMeaning, flat: Mapping[Way, Any]) -> int | None:
    """Updates made so far: as the optimizer counts, and else the training, which may count batches."""
    counted = [number(flat[way]) for way in (meaning.states.counts if meaning.states else ())]
    known = [count for count in counted if count is not None]
    return max(known) if known else number(flat[meaning.step]) if meaning.step else None


def _optimizer(
    states: States, flat: Mapping[Way, Any], trained: Mapping[str, Tensor], step: int | None
) -> OptimizerState:
    slots: dict[str | int, dict[str, Any]] = {}
    for way, (name, slot, sign) in states.slots.items():
        slots.setdefault(name, {})[slot] = with_sign(flat[way], sign)
    kept = {frozenset(each) for each in slots.values()} or {frozenset[str]()}
    families = FAMILIES.get(kept.pop(), ()) if len(kept) == 1 else ()
    if "adafactor" in families:
        slots = {name: factors(each, trained[str(name)].shape) for name, each in slots.items() if name in trained}
    if step is not None:
        slots = {name: {**each, COUNT: step} for name, each in slots.items()}
    return OptimizerState(families, _groups(states, flat, [*trained]), slots, variant="optax")


def _groups(states: States, flat: Mapping[Way, Any], trained: list[str]) -> tuple[ParameterGroup, ...]:
    """Parameters by the label that they have, as far as what is kept of them tells."""
    members = {label: [name for name in trained if name in names] for label, names in states.members.items()}
    left = [name for name in trained if not any(name in names for names in members.values())]
    silent = [label for label, names in members.items() if not names]
    if left:
        members.setdefault(silent[0] if len(silent) == 1 else "", []).extend(left)
    groups = []
    for label, names in members.items():
        settings = {}
        for name, way in states.settings.get(label, states.settings.get("", {})).items():
            leaf = flat[way]
            settings[name] = leaf.array().item() if isinstance(leaf, Tensor) and not leaf.shape else leaf
        numbers = {
            SETTINGS.get(name, name): value for name, value in settings.items() if isinstance(value, int | float)
        }
        if states.schedules:
            numbers.pop("lr", None)  # the rate of the moment, and not the one that a schedule begins with
        groups += [ParameterGroup(None, tuple(names), settings, numbers=numbers)] if names else []
    return tuple(groups)


def _remarks(states: States, flat: Mapping[Way, Any]) -> list[str]:
    said = []
    counts = sorted({count for way in states.counts if (count := number(flat[way])) is not None})
    if len(counts) > 1:
        said.append(f"parts of the optimizer have made different numbers of updates: {', '.join(map(str, counts))}")
    if states.waiting and (waiting := number(flat[states.waiting])):
        said.append(f"gradients of {waiting} batches wait for an update, and are lost in other formats")
    if states.unknown:
        names = ["/".join(way) for way in states.unknown]
        said.append(f"of the optimizer's state, {list_names(names, 3)} is of a kind that is not known")
    return said


# ---- writing ---------------------------------------------------------------------------------------------------------

_TREES: dict[str, Any] = {"orbax": None, "flax": {}}
"""Formats of trees, and what they store a state of optax as that keeps nothing."""


def tree_of(checkpoint: Checkpoint, empty: Any) -> Any:
    """The tree to write: that which was read, with the numbers of now, or else a new one.

    `empty` is what a state of optax that keeps nothing is stored as.
    """
    kept = None
    if checkpoint.format in _TREES:
        items = {name: tree for name, tree in checkpoint.trees.items() if name != INFORMATION}
        kept = next(iter(items.values())) if len(items) == 1 else items or None
    if kept is None or not set(meaning_of(kept).parameters.values()) <= checkpoint.tensors.keys():
        return new_tree(checkpoint, empty)
    tree, stored_as = update_tree(kept, checkpoint), _TREES[checkpoint.format]
    place = find(kept, OPTIMIZER, ())
    if stored_as == empty or place is None:
        return tree
    inside = len(place)
    return map_leaves(tree, lambda way, leaf: empty if way[:inside] == place and leaf == stored_as else leaf)


def update_tree(tree: Any, checkpoint: Checkpoint) -> Any:
    """A tree that was read, with the numbers that a checkpoint has now; all else is as it was."""
    meaning, flat = meaning_of(tree), dict(leaves(tree))
    new: dict[Way, Any] = {}
    for places, tensors in (
        (meaning.parameters | meaning.statistics, checkpoint.tensors),
        (meaning.averages, checkpoint.averages),
    ):
        new |= {way: _like(flat[way], tensors[name]) for way, name in places.items() if name in tensors}
    counts = {way: count for way in meaning.counters if (count := number(flat[way])) is not None}
    before = updates_made(meaning, flat)
    passed = 0 if checkpoint.step is None or before is None else checkpoint.step - before
    for way, count in counts.items():
        unit = count // before if before and count % before == 0 and count else 1  # in what a training counts
        new[way] = _counter(flat[way], count + passed * unit)
    if meaning.states and checkpoint.optimizers:
        kept = checkpoint.optimizers[0].slots
        for way, (name, slot, sign) in meaning.states.slots.items():
            known = kept.get(name, {})
            slot = LARGEST if slot == SECOND and LARGEST in known else slot
            if slot in known:
                new[way] = _like(flat[way], with_sign(known[slot], sign))
        if passed and meaning.states.waiting:
            new |= {way: _zeros(flat[way]) for way in [meaning.states.waiting, *meaning.states.accumulated]}
    return map_leaves(tree, lambda way, leaf: new.get(way, leaf))


def _like(old: Tensor, new: Tensor) -> Tensor:
    """A tensor in the shape and type that a tree has it in."""
    if math.prod(old.shape) != math.prod(new.shape):
        raise UnsupportedError(
            f"a tensor of {list(old.shape)} has become one of {list(new.shape)}: the tree that was read does not fit",
            hint="write what was read without changing shapes",
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
    """What a training in JAX saves, for a checkpoint of another framework: as the `TrainState` of Flax has it."""
    slots = {name: each for of in checkpoint.optimizers for name, each in of.slots.items()}
    trained = {name for group in checkpoint.stored_groups for name in group.parameters}
    tensors = {name: slots.get(name, {}).get(MASTER, tensor) for name, tensor in checkpoint.tensors.items()}
    others = {name: tensor for name, tensor in tensors.items() if trained and name not in trained}
    tree = {"step": checkpoint.step or 0, "params": nest_names({k: v for k, v in tensors.items() if k not in others})}
    if checkpoint.optimizers:
        tree["opt_state"] = optimizer_state(checkpoint, empty)
    if others:
        tree["batch_stats"] = nest_names(others)
    if checkpoint.averages:
        tree["ema"] = nest_names(checkpoint.averages)
    return tree
