"""States of optax: written for optimizers of a recipe, and read from trees.

Written are the trees that the `init` of optax's own optimizers makes, filled. Where optax has an optimizer by name
(`optax.adamw`), its state is that one's; where it takes several transformations, that of their chain, as
`onward.to_jax` makes it. What is read has the fields of states, but neither classes nor numbers of optimizers: fields
tell what is kept, and which optimizers it can be of.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytree import WRAPPER, Way, names_of_tensors, nest_names, parts
from onward.errors import InvalidModelError, UnsupportedError, warn
from onward.recipe.optimizers import ConfiguredOptimizer, optimizer
from onward.recipe.spec import Spec
from onward.run_state.state import OptimizerState, ParameterGroup
from onward.run_state.tensors import ArrayTensor, ComputedTensor, Tensor
from onward.vocabulary.optax import reduced_axis
from onward.vocabulary.optimizers import EPSILON, OPTAX_ROWS, TRANSFORMATIONS
from onward.vocabulary.rows import row_for
from onward.vocabulary.torch import FAMILIES as OF_PYTORCH


def optimizer_state(checkpoint: Checkpoint, empty: Any) -> Any:
    """The state of optax that goes on with the optimizer of a checkpoint. `empty` is what stands for nothing."""
    if len(checkpoint.optimizers) != 1:
        raise UnsupportedError(
            f"the checkpoint has {len(checkpoint.optimizers)} optimizers, and a state of optax is of one",
            hint="write them one by one",
        )
    made = _Maker(checkpoint, checkpoint.optimizers[0], empty)
    chains = [made.chain(group) for group in made.groups]
    state: Any = chains[0]
    if len(chains) > 1:
        state = {"inner_states": {f"group{i}": {"inner_state": chain} for i, chain in enumerate(chains)}}
    state = [empty, state] if checkpoint.clip else state
    if (checkpoint.accumulate or 1) <= 1:
        return state
    zeros = {name: _fill_like(checkpoint.tensors[name], 0.0) for name in made.trained}
    counts = {"mini_step": _counter(0), "gradient_step": _counter(checkpoint.step or 0)}
    return {**counts, "inner_opt_state": state, "acc_grads": nest_names(zeros), "skip_state": []}


class _Maker:
    def __init__(self, checkpoint: Checkpoint, of: OptimizerState, empty: Any):
        self._tensors, self._slots, self._empty = checkpoint.tensors, of.slots, empty
        self._step = checkpoint.step or 0
        self._is_scheduled = any(each.words is None or each.words for each in checkpoint.schedules)
        self.groups = [group for group in of.groups if group.parameters]
        self.trained = [str(name) for group in self.groups for name in group.parameters]
        if unnamed := [name for name in self.trained if name not in self._tensors]:
            raise UnsupportedError(
                f"the optimizer keeps state of `{unnamed[0]}`, which is no parameter of the checkpoint",
                hint="read it together with its model, so that parameters have names",
            )

    def chain(self, group: ParameterGroup) -> list[Any]:
        if group.optimizer is None:
            raise UnsupportedError(
                "the checkpoint does not say which optimizer it is of, and states of optax differ",
                hint="say which when it is read: `optimizer=...`",
            )
        spec = group.spec
        configured = optimizer(spec.name).configure(**spec.options)
        made = [self._stage(stage, group, configured) for stage in stages(spec, configured)]
        _warn_of_epsilon(configured, self._step)
        return made

    def _stage(self, stage: str, group: ParameterGroup, configured: ConfiguredOptimizer) -> Any:
        row, state = TRANSFORMATIONS[stage], {}
        if row.counts or (stage == "scale_by_learning_rate" and self._is_scheduled):
            state["count"] = _counter(self._step)
        for field, slot in row.slots.items():
            state[field] = nest_names({name: self._slot(name, slot, group, configured) for name in self.trained})
        return state or self._empty

    def _slot(self, name: str, slot: str, group: ParameterGroup, configured: ConfiguredOptimizer) -> Any:
        if name not in group.parameters:
            return self._empty
        kept, shape = self._slots.get(name, {}), self._tensors[name].shape
        if slot in ("row_var", "col_var", "variance") and kept:
            return _factor(kept, slot, shape)
        if slot in kept:
            return self._momentum(kept[slot], configured) if slot == "momentum_buffer" else kept[slot]
        if self._step:
            raise UnsupportedError(f"`{slot}` of `{name}` is not in the checkpoint, after {self._step} updates")
        start = configured.kind.initial.get(slot, 0.0)
        return _fill_like(self._tensors[name], configured.values[start] if isinstance(start, str) else start)

    def _momentum(self, tensor: Tensor, configured: ConfiguredOptimizer) -> Tensor:
        """RMSprop of optax has momentum after the learning rate, with its sign; SGD of Keras has the rate in it."""
        settings = configured.settings
        if configured.kind.name == "rmsprop":
            return with_sign(tensor, 1 if settings.variant == "torch" else -1)
        if settings.variant != "keras":
            return tensor
        if self._is_scheduled or not settings.lr:
            raise UnsupportedError(
                "momentum of Keras has the learning rates of earlier steps in it, which optax applies afterwards",
                hint="write it with a program of its own: `onward convert training.onnx --to jax`",
            )
        return ComputedTensor(
            tensor.dtype, tensor.shape, lambda: (tensor.array() / -settings.lr).astype(tensor.dtype, copy=False)
        )


def _counter(count: int) -> Tensor:
    return ArrayTensor(np.asarray(count, np.int32))


def _fill_like(like: Tensor, value: float) -> Tensor:
    return ComputedTensor(like.dtype, like.shape, lambda: np.full(like.shape, value, like.dtype))


def _factor(kept: Mapping[str, Any], slot: str, shape: tuple[int, ...]) -> Tensor:
    """Of Adafactor: optax has no axis where others have one of size 1, and a zero where there is nothing to keep."""
    if slot not in kept:
        return ArrayTensor(np.zeros(1, next(each for each in kept.values() if isinstance(each, Tensor)).dtype))
    axis = reduced_axis(slot, shape)
    return reshape(kept[slot], shape[:axis] + shape[axis + 1 :])


def stages(spec: Spec, configured: ConfiguredOptimizer) -> list[str]:
    """Return the names of the transformations in the chain of optax for an optimizer of a recipe."""
    row = row_for(OPTAX_ROWS, configured)
    if row is None:
        raise UnsupportedError(
            f"optax has no optimizer that goes on with the state of `{spec}`",
            hint="write it with a program of its own: `onward convert training.onnx --to jax`",
        )
    return [name for name, _ in row.calls(configured)]


def _warn_of_epsilon(configured: ConfiguredOptimizer, step: int) -> None:
    """Say what of an optimizer's arithmetic, which is not stored, is another in optax."""
    settings, name = configured.settings, (configured.kind.name, configured.settings.variant)
    row = row_for(OPTAX_ROWS, configured)
    if row is None or row.difference != EPSILON:
        return
    more = ""
    if name[0] in ("adam", "adamw"):  # whose epsilon stands before bias correction, in Keras and transformers
        more = f"; {settings.eps / math.sqrt(1 - settings.beta2 ** (step + 1)):.3g} comes nearest at first"
    if settings.variant == "transformers" and settings.weight_decay:
        more += "; and weights decay before the step, not after it"
    warn(f"epsilon {settings.eps:g} is added at another place in optax than by `{' of '.join(name)}`{more}")


# ---- reading ---------------------------------------------------------------------------------------------------------

_STATES = {
    frozenset({*row.slots, *(["count"] if row.counts else [])}): row.slots
    for row in reversed(TRANSFORMATIONS.values())
    if row.slots
}
_STATES[frozenset({"count", "nu"})] = TRANSFORMATIONS["scale_by_rms"].slots
"""Fields of a state -> which slots these are. Some transformations have the fields of Adam, with the same meaning."""
_ROOT_MEAN_SQUARES = [row.slots for name, row in TRANSFORMATIONS.items() if name in ("scale_by_rms", "scale_by_stddev")]

FAMILIES: dict[frozenset[str], tuple[str, ...]] = {
    **{frozenset(row.slots): row.optimizers[:1] for row in reversed(OPTAX_ROWS)},
    **OF_PYTORCH,
    frozenset(): ("sgd",),
    frozenset({"exp_avg", "exp_avg_sq"}): tuple(
        dict.fromkeys(row.optimizers[0] for row in OPTAX_ROWS if {*row.slots.values()} == {"mu", "nu"})
    ),
    frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}): ("amsgrad",),
}
"""Optimizers by what they keep."""

_COUNTERS = ("count", "step", "gradient_step")


class KeptSlot(NamedTuple):
    parameter: str
    slot: str
    sign: int = 1
    """-1: optax keeps it with the sign of updates."""


@dataclasses.dataclass
class States:
    """What there is in a state of optax, by place."""

    slots: dict[Way, KeptSlot] = dataclasses.field(default_factory=dict)
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
        elif (known := _STATES.get(frozenset(fields))) is not None:
            self._slots({slot: field for field, slot in known.items()}, inside, way, label, sign)
        elif fields == {"count", "slots"}:  # of what optax does not have: see frameworks/jax/updates.py
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
            self.slots |= {place: KeptSlot(name, slot, sign) for place, name in found.items()}
            members = self.members.setdefault(label, [])
            members += [name for name in found.values() if name not in members]

    def _inside(self, inside: Mapping[str, Any], way: Way, label: str) -> None:
        """The parts of a chain, or of what else is around states."""
        scaled, last = False, [*inside][-1]
        for key, part in inside.items():
            fields = frozenset(dict(parts(part)))
            # RMSprop of optax has its momentum after the learning rate, with the sign of updates.
            outer = scaled and key == last and fields == {"trace"}
            scaled |= _STATES.get(fields) in _ROOT_MEAN_SQUARES
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


def with_sign(tensor: Tensor, sign: int) -> Tensor:
    return tensor if sign > 0 else ComputedTensor(tensor.dtype, tensor.shape, lambda: -tensor.array())


def factors(slots: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """What Adafactor keeps of a parameter, without the zeros that optax puts where there is nothing to keep."""
    if slots["variance"].shape == shape:
        return {"variance": slots["variance"]}
    axes = {slot: reduced_axis(slot, shape) for slot in ("row_var", "col_var")}
    if any(slots[slot].shape != shape[:axis] + shape[axis + 1 :] for slot, axis in axes.items()):
        raise InvalidModelError(f"what Adafactor keeps of a parameter does not fit its shape {list(shape)}")
    return {slot: reshape(slots[slot], (*shape[:axis], 1, *shape[axis + 1 :])) for slot, axis in axes.items()}


def reshape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return ComputedTensor(tensor.dtype, shape, lambda: tensor.array().reshape(shape))
