"""What trees of JAX hold: parameters, states of optax, counters, keys of random numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytree.optax_trees import FAMILIES, WORDS, States, factors, unwrap_variable, with_sign
from onward.checkpoint.pytree.pytrees import DATA, KEY, Way, at, leaves, names_of_tensors, parts
from onward.errors import list_names
from onward.run_state.state import COUNT, OptimizerState, ParameterGroup, RandomState, SchedulerState
from onward.run_state.tensors import Tensor

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


# ---- what is where ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Meaning:
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


def meaning_of(tree: Any) -> Meaning:
    """What is where, by the names that trainings use. Where nothing is called parameters, all tensors are."""
    found = Meaning(random=_keys(tree))
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


def _around(way: Way) -> Way:
    """The place of a key, typed or not."""
    return way[:-1] if way[-1] == DATA else way


def number(leaf: Any) -> int | None:
    """A counter."""
    if isinstance(leaf, Tensor) and not leaf.shape and leaf.dtype.kind in "iu":
        return int(leaf.array().item())
    is_whole = isinstance(leaf, int | np.integer) and not isinstance(leaf, bool)
    return int(leaf) if is_whole else None


# ---- a checkpoint ----------------------------------------------------------------------------------------------------


def checkpoint_of_tree(path: Path, format: str, title: str, tree: Any, **facts: Any) -> Checkpoint:
    """What is in a tree. `facts` are fields of the checkpoint that are known already."""
    meaning, flat = meaning_of(tree), dict(leaves(tree))
    tensors = {name: flat[way] for way, name in (meaning.parameters | meaning.statistics).items()}
    step, counted = updates_made(meaning, flat), number(flat[meaning.step]) if meaning.step else None
    known: dict[str, Any] = {
        "step": step,
        "progress": {name: count for name, count in (("step", counted),) if count is not None},
        "randomness": tuple(RandomState("jax", at(tree, _around(way))) for way in meaning.random),
        "averages": {name: flat[way] for way, name in meaning.averages.items()},
        **facts,
    }
    if meaning.states:
        trained = {name: tensors[name] for name in meaning.parameters.values() if tensors[name].dtype.kind not in "biu"}
        known["optimizers"] = (_optimizer(meaning.states, flat, trained, step),)
        known["schedules"] = (_schedule(meaning.states, flat, step),)
        known["waiting"] = (number(flat[meaning.states.waiting]) or 0) if meaning.states.waiting else 0
        known["accumulate"] = (
            0 if meaning.states.waiting else None
        )  # `MultiSteps` does not store its `every_k_schedule`
        known["remarks"] = (*known.get("remarks", ()), *_remarks(meaning.states, flat))
    return Checkpoint(path=path, format=format, title=title, tensors=tensors, **known)


def updates_made(meaning: Meaning, flat: Mapping[Way, Any]) -> int | None:
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
        settings = {
            name: _plain(flat[way]) for name, way in states.settings.get(label, states.settings.get("", {})).items()
        }
        numbers = {WORDS.get(name, name): value for name, value in settings.items() if isinstance(value, int | float)}
        if states.schedules:
            numbers.pop("lr", None)  # the rate of the moment, and not the one that a schedule begins with
        groups += [ParameterGroup(None, tuple(names), settings, numbers=numbers)] if names else []
    return tuple(groups)


def _plain(leaf: Any) -> Any:
    return leaf.array().item() if isinstance(leaf, Tensor) and not leaf.shape else leaf


def _schedule(states: States, flat: Mapping[Way, Any], step: int | None) -> SchedulerState:
    """Whether there is one is told by its counter; its shape is not stored."""
    if not states.schedules:
        return SchedulerState({}, (), step, every=1)
    position = max((number(flat[way]) or 0) for way in states.schedules)
    return SchedulerState({"count": position}, None, position, every=1)


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
