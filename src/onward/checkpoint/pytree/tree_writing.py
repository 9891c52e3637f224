"""Trees of JAX to be written: those that were read, with the numbers of now, or new ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytree.optax_states import optimizer_state
from onward.checkpoint.pytree.optax_trees import LARGEST, SECOND, with_sign
from onward.checkpoint.pytree.pytrees import Way, leaves, map_leaves, nest_names
from onward.checkpoint.pytree.train_states import INFORMATION, OPTIMIZER, find, meaning_of, number, updates_made
from onward.errors import UnsupportedError
from onward.run_state.state import MASTER
from onward.run_state.tensors import ArrayTensor, ComputedTensor, Tensor

_TREES: dict[str, Any] = {"orbax": None, "flax": {}}
"""Formats of trees, and what they store a state of optax as that keeps nothing."""


def tree_of(checkpoint: Checkpoint, empty: Any) -> Any:
    """The tree to write: that which was read, with the numbers of now, or else a new one.

    `empty` is what a state of optax that keeps nothing is stored as.
    """
    kept = _source_tree(checkpoint)
    if kept is None or not set(meaning_of(kept).parameters.values()) <= checkpoint.tensors.keys():
        return new_tree(checkpoint, empty)
    tree, stored_as = update_tree(kept, checkpoint), _TREES[checkpoint.format]
    place = find(kept, OPTIMIZER, ())
    if stored_as == empty or place is None:
        return tree
    inside = len(place)
    return map_leaves(tree, lambda way, leaf: empty if way[:inside] == place and leaf == stored_as else leaf)


def _source_tree(checkpoint: Checkpoint) -> Any:
    """The tree of JAX that a checkpoint has been read from."""
    if checkpoint.format not in _TREES:
        return None
    items = {name: tree for name, tree in checkpoint.trees.items() if name != INFORMATION}
    return next(iter(items.values())) if len(items) == 1 else items or None


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
    new |= {way: _counter(flat[way], count + passed * _unit(count, before)) for way, count in counts.items()}
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


def _unit(count: int, updates: int | None) -> int:
    """How many there are for an update of what a training counts."""
    return count // updates if updates and count % updates == 0 and count else 1


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
    trained = {name for of in checkpoint.optimizers for group in of.groups for name in group.parameters}
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
