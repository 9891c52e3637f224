"""States of optax as they are stored: which place of a tree is which slot of which parameter.

What is stored has the fields of states and not their classes, and neither a class of an optimizer nor its numbers:
fields tell what is kept, and what it can be of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from onward.checkpoint.pytorch.optimizers import FAMILIES as OF_PYTORCH
from onward.checkpoint.pytree.pytrees import WRAPPER, Way, names_of_tensors, parts
from onward.errors import InvalidModelError
from onward.run_state.state import OptimizerState
from onward.run_state.tensors import ComputedTensor, Tensor
from onward.vocabulary.optax import FIELDS

_STATES: dict[frozenset[str], str] = {
    frozenset({"trace"}): "trace",
    frozenset({"count", "mu", "nu"}): "scale_by_adam",
    frozenset({"count", "mu", "nu", "nu_max"}): "scale_by_amsgrad",
    frozenset({"count", "mu"}): "scale_by_lion",
    frozenset({"sum_of_squares"}): "scale_by_rss",
    frozenset({"nu"}): "scale_by_rms",
    frozenset({"count", "nu"}): "scale_by_rms",
    frozenset({"mu", "nu"}): "scale_by_stddev",
    frozenset({"e_g", "e_x"}): "scale_by_adadelta",
    frozenset({"count", "v_row", "v_col", "v"}): "scale_by_factored_rms",
}
"""The transformation whose state has these fields. Some others have those of Adam, with the same meaning."""

FAMILIES: dict[frozenset[str], tuple[str, ...]] = {
    **OF_PYTORCH,
    frozenset(): ("sgd",),
    frozenset({"exp_avg", "exp_avg_sq"}): ("adam", "adamw", "nadam", "radam", "lamb", "adamax"),
    frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}): ("amsgrad",),
}
"""Optimizers by what they keep."""

WORDS = {"learning_rate": "lr", "b1": "beta1", "b2": "beta2", "decay": "alpha", "weight_decay_rate": "weight_decay"}
"""Hyper-parameters of optax that have another name in a recipe."""

_COUNTERS = ("count", "step", "gradient_step")


class Slot(NamedTuple):
    parameter: str
    slot: str
    sign: int = 1
    """-1: optax keeps it with the sign of updates."""


@dataclasses.dataclass
class States:
    """What there is in a state of optax, by place."""

    slots: dict[Way, Slot] = dataclasses.field(default_factory=dict)
    counts: list[Way] = dataclasses.field(default_factory=list)
    schedules: list[Way] = dataclasses.field(default_factory=list)
    """Counters that are all that a state has: those of schedules."""
    members: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Parameters that something is kept of, by the label of their group; all have the label '' without groups."""
    settings: dict[str, dict[str, Way]] = dataclasses.field(default_factory=dict)
    """Hyper-parameters that `inject_hyperparams` keeps, by label."""
    accumulated: dict[Way, str] = dataclasses.field(default_factory=dict)
    """Means of gradients that wait for an update, and the parameters that they are of."""
    waiting: Way | None = None
    """How many gradients these are of."""
    unknown: list[Way] = dataclasses.field(default_factory=list)

    def read(self, tree: Any, way: Way, label: str = "", sign: int = 1) -> None:
        """Find out what is in a state."""
        inside = dict(parts(tree))
        fields = inside.keys()
        if not inside:
            self._end(tree, way)
        elif (transformation := _STATES.get(frozenset(fields))) is not None:
            self._slots({slot: field for field, slot in FIELDS[transformation].items()}, inside, way, label, sign)
        elif fields == {"count", "slots"}:  # of what optax does not have: see frameworks/jax/exact.py
            kept = dict(parts(inside["slots"]))
            self._slots({slot: slot for slot in kept}, kept, (*way, "slots"), label, sign)
        elif fields == {"inner_states"}:
            for name, part in parts(inside["inner_states"]):
                self.members.setdefault(name, [])
                self.read(part, (*way, "inner_states", name), name)
        elif {"hyperparams", "inner_state"} <= fields:
            self.settings[label] = {
                name: unwrap_variable(part, (*way, "hyperparams", name)) for name, part in parts(inside["hyperparams"])
            }
            self._inside({key: inside[key] for key in inside if key != "hyperparams"}, way, label)
        elif {"mini_step", "inner_opt_state", "acc_grads"} <= fields:
            self.waiting = unwrap_variable(inside["mini_step"], (*way, "mini_step"))
            self.accumulated = names_of_tensors(inside["acc_grads"], (*way, "acc_grads"))
            self._inside({key: inside[key] for key in ("gradient_step", "inner_opt_state")}, way, label)
        elif fields != {"count"}:
            self._inside(inside, way, label)
        if "count" in fields:
            counter = unwrap_variable(inside["count"], (*way, "count"))
            self.counts.append(counter)
            self.schedules += [counter] if fields == {"count"} else []

    def _slots(self, slots: Mapping[str, str], fields: Mapping[str, Any], way: Way, label: str, sign: int) -> None:
        for slot, field in slots.items():
            found = names_of_tensors(fields[field], (*way, field))
            self.slots |= {place: Slot(name, slot, sign) for place, name in found.items()}
            members = self.members.setdefault(label, [])
            members += [name for name in found.values() if name not in members]

    def _inside(self, inside: Mapping[str, Any], way: Way, label: str) -> None:
        """The parts of a chain, or of what else is around states."""
        scaled, last = False, [*inside][-1]
        for key, part in inside.items():
            fields = frozenset(dict(parts(part)))
            # RMSprop of optax has its momentum after the learning rate, with the sign of updates.
            outer = scaled and key == last and fields == {"trace"}
            scaled |= _STATES.get(fields) in ("scale_by_rms", "scale_by_stddev")
            if key != "count":
                self.read(part, (*way, key), label, -1 if outer else 1)

    def _end(self, leaf: Any, way: Way) -> None:
        named_so = way[-2] if way[-1:] == (WRAPPER,) else way[-1] if way else ""
        if leaf is None or isinstance(leaf, Mapping | list | tuple):
            return
        (self.counts if named_so in _COUNTERS else self.unknown).append(way)


def unwrap_variable(tree: Any, way: Way) -> Way:
    """The place of a number, also inside a variable of NNX."""
    return (*way, WRAPPER) if isinstance(tree, Mapping) and [*tree] == [WRAPPER] else way


SECOND, LARGEST = "exp_avg_sq", "exp_inf"
"""Both are `nu` in optax: Adamax keeps the largest gradients where Adam has their squares."""


def of_adamax(optimizer: OptimizerState, parameters: Collection[str]) -> OptimizerState:
    """An optimizer of optax, when it is known which parameters it trains by Adamax."""
    slots = {
        name: {LARGEST if slot == SECOND and name in parameters else slot: value for slot, value in kept.items()}
        for name, kept in optimizer.slots.items()
    }
    return dataclasses.replace(optimizer, slots=slots) if optimizer.variant == "optax" else optimizer


# ---- what is kept, as a training model has it ------------------------------------------------------------------------


def with_sign(tensor: Tensor, sign: int) -> Tensor:
    return tensor if sign > 0 else ComputedTensor(tensor.dtype, tensor.shape, lambda: -tensor.array())


def factors(slots: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """What Adafactor keeps of a parameter, without the zeros that optax puts where there is nothing to keep."""
    if slots["variance"].shape == shape:
        return {"variance": slots["variance"]}
    small, large = (int(axis) for axis in np.argsort(shape)[-2:])
    axes = {"row_var": large, "col_var": small}
    if any(slots[slot].shape != shape[:axis] + shape[axis + 1 :] for slot, axis in axes.items()):
        raise InvalidModelError(f"what Adafactor keeps of a parameter does not fit its shape {list(shape)}")
    return {slot: reshape(slots[slot], (*shape[:axis], 1, *shape[axis + 1 :])) for slot, axis in axes.items()}


def reshape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return ComputedTensor(tensor.dtype, shape, lambda: tensor.array().reshape(shape))
