"""States of optax: written for optimizers of a recipe, and read from trees.

The writer fills the tree that `init` of the optimizer makes: of `optax.adamw` or the like, or of
the chain of transformations that `onward.to_jax` makes. Stored states have fields, but no classes
or hyper-parameters of optimizers: the fields tell which optimizers they can be of.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytree import WRAPPER, KeyPath, names_of_tensors, nest_names, parts
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
    """Return the state of optax for a checkpoint. `empty` is a state without fields."""
    if len(checkpoint.optimizers) != 1:
        raise UnsupportedError(
            f"the checkpoint has {len(checkpoint.optimizers)} optimizers, and optax's state is of one",
            hint="write a checkpoint for each",
        )
    maker = _Maker(checkpoint, checkpoint.optimizers[0], empty)
    chains = [maker.chain(group) for group in maker.groups]
    state: Any = chains[0]
    if len(chains) > 1:
        state = {"inner_states": {f"group{i}": {"inner_state": chain} for i, chain in enumerate(chains)}}
    state = [empty, state] if checkpoint.clip else state
    if (checkpoint.accumulate or 1) <= 1:
        return state
    zeros = {name: _fill_like(checkpoint.tensors[name], 0.0) for name in maker.trained}
    counts = {"mini_step": _counter(0), "gradient_step": _counter(checkpoint.step or 0)}
    return {**counts, "inner_opt_state": state, "acc_grads": nest_names(zeros), "skip_state": []}


class _Maker:
    def __init__(self, checkpoint: Checkpoint, of: OptimizerState, empty: Any):
        self._tensors, self._slots, self._empty = checkpoint.tensors, of.slots, empty
        self._step = checkpoint.step or 0
        self._is_scheduled = any(schedule.words is None or schedule.words for schedule in checkpoint.schedules)
        self.groups = [group for group in of.groups if group.parameters]
        self.trained = [str(name) for group in self.groups for name in group.parameters]
        if unnamed := [name for name in self.trained if name not in self._tensors]:
            raise UnsupportedError(
                f"the optimizer has state of `{unnamed[0]}`, which the checkpoint lacks",
                hint="make a training model of it first: `onward convert ... --like model.onnx`",
            )

    def chain(self, group: ParameterGroup) -> list[Any]:
        if group.optimizer is None:
            raise UnsupportedError(
                "the checkpoint does not name its optimizer, which optax's state needs",
                hint="name it when it is read: `optimizer=...`",
            )
        spec = group.spec
        configured = optimizer(spec.name).configure(**spec.options)
        result = [self._stage(stage, group, configured) for stage in stages(spec, configured)]
        _warn_of_epsilon(configured, self._step)
        return result

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
        slots, shape = self._slots.get(name, {}), self._tensors[name].shape
        if slot in ("row_var", "col_var", "variance") and slots:
            return _factor(slots, slot, shape)
        if slot in slots:
            return self._momentum(slots[slot], configured) if slot == "momentum_buffer" else slots[slot]
        if self._step:
            raise UnsupportedError(f"the checkpoint lacks `{slot}` of `{name}` after {self._step} updates")
        start = configured.definition.initial.get(slot, 0.0)
        return _fill_like(self._tensors[name], configured.values[start] if isinstance(start, str) else start)

    def _momentum(self, tensor: Tensor, configured: ConfiguredOptimizer) -> Tensor:
        """Return momentum in the units of optax.

        RMSprop of optax has momentum after the learning rate, with its sign. SGD of Keras includes
        the rate.
        """
        settings = configured.settings
        if configured.definition.name == "rmsprop":
            return with_sign(tensor, 1 if settings.variant == "torch" else -1)
        if settings.variant != "keras":
            return tensor
        if self._is_scheduled or not settings.lr:
            raise UnsupportedError(
                "momentum of Keras includes earlier learning rates, which optax applies afterwards",
                hint="write it with a program of its own: `onward convert training.onnx --to jax`",
            )
        return ComputedTensor(
            tensor.dtype, tensor.shape, lambda: (tensor.array() / -settings.lr).astype(tensor.dtype, copy=False)
        )


def _counter(count: int) -> Tensor:
    return ArrayTensor(np.asarray(count, np.int32))


def _fill_like(like: Tensor, value: float) -> Tensor:
    return ComputedTensor(like.dtype, like.shape, lambda: np.full(like.shape, value, like.dtype))


def _factor(slots: Mapping[str, Any], slot: str, shape: tuple[int, ...]) -> Tensor:
    """Return a slot of Adafactor: optax has no axis of size 1, and a zero for an empty slot."""
    if slot not in slots:
        return ArrayTensor(np.zeros(1, next(value for value in slots.values() if isinstance(value, Tensor)).dtype))
    axis = reduced_axis(slot, shape)
    return reshape(slots[slot], shape[:axis] + shape[axis + 1 :])


def stages(spec: Spec, configured: ConfiguredOptimizer) -> list[str]:
    """Return the names of the transformations in optax's chain for an optimizer."""
    row = row_for(OPTAX_ROWS, configured)
    if row is None:
        raise UnsupportedError(
            f"optax has no optimizer with the state of `{spec}`",
            hint="write a program: `onward convert training.onnx --to jax`",
        )
    return [name for name, _ in row.calls(configured)]


def _warn_of_epsilon(configured: ConfiguredOptimizer, step: int) -> None:
    """Warn of arithmetic that differs in optax, which the state does not show."""
    settings, name = configured.settings, (configured.definition.name, configured.settings.variant)
    row = row_for(OPTAX_ROWS, configured)
    if row is None or row.difference != EPSILON:
        return
    suffix = ""
    if name[0] in ("adam", "adamw"):  # Keras and transformers add epsilon before bias correction
        suffix = f"; {settings.eps / math.sqrt(1 - settings.beta2 ** (step + 1)):.3g} is nearest at first"
    if settings.variant == "transformers" and settings.weight_decay:
        suffix += "; and weights decay before the step, not after it"
    warn(f"epsilon {settings.eps:g} is added elsewhere in optax than by `{' of '.join(name)}`{suffix}")


# ---- reading ---------------------------------------------------------------------------------------------------------

_STATES = {
    frozenset({*row.slots, *(["count"] if row.counts else [])}): row.slots
    for row in reversed(TRANSFORMATIONS.values())
    if row.slots
}
_STATES[frozenset({"count", "nu"})] = TRANSFORMATIONS["scale_by_rms"].slots
"""Fields of a state -> their slots. Some transformations share Adam's fields."""
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
"""Slots -> optimizers."""

_COUNTERS = ("count", "step", "gradient_step")


class SlotOfParameter(NamedTuple):
    """Parameter and slot of a tensor."""

    parameter: str
    slot: str
    sign: int = 1
    """-1: optax stores it with the sign of updates."""


@dataclasses.dataclass
class States:
    """Content of a state of optax, by path."""

    slots: dict[KeyPath, SlotOfParameter] = dataclasses.field(default_factory=dict)
    counts: list[KeyPath] = dataclasses.field(default_factory=list)
    schedules: list[KeyPath] = dataclasses.field(default_factory=list)
    """Counters of schedules, whose states have no other field."""
    members: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Parameters with state, by the label of their group; '' without groups."""
    settings: dict[str, dict[str, KeyPath]] = dataclasses.field(default_factory=dict)
    """Hyper-parameters of `inject_hyperparams`, by label."""
    accumulated: dict[KeyPath, str] = dataclasses.field(default_factory=dict)
    """Means of gradients that wait for an update -> their parameters."""
    waiting: KeyPath | None = None
    """Number of these gradients."""
    unknown: list[KeyPath] = dataclasses.field(default_factory=list)

    def read(self, tree: Any, path: KeyPath, label: str = "", sign: int = 1) -> None:
        """Add the content of a state."""
        children = dict(parts(tree))
        fields = children.keys()
        if not children:
            name = path[-2] if path[-1:] == (WRAPPER,) else path[-1] if path else ""
            if tree is not None and not isinstance(tree, Mapping | list | tuple):
                (self.counts if name in _COUNTERS else self.unknown).append(path)
        elif (slot_fields := _STATES.get(frozenset(fields))) is not None:
            self._slots({slot: field for field, slot in slot_fields.items()}, children, path, label, sign)
        elif fields == {"count", "slots"}:  # of what optax does not have: see frameworks/jax/updates.py
            slots = dict(parts(children["slots"]))
            self._slots({slot: slot for slot in slots}, slots, (*path, "slots"), label, sign)
        elif fields == {"inner_states"}:
            for name, child in parts(children["inner_states"]):
                self.members.setdefault(name, [])
                self.read(child, (*path, "inner_states", name), name)
        elif {"hyperparams", "inner_state"} <= fields:
            self.settings[label] = {
                name: unwrap_variable(child, (*path, "hyperparams", name))
                for name, child in parts(children["hyperparams"])
            }
            self._inside({key: children[key] for key in children if key != "hyperparams"}, path, label)
        elif {"mini_step", "inner_opt_state", "acc_grads"} <= fields:
            self.waiting = unwrap_variable(children["mini_step"], (*path, "mini_step"))
            self.accumulated = names_of_tensors(children["acc_grads"], (*path, "acc_grads"))
            self._inside({key: children[key] for key in ("gradient_step", "inner_opt_state")}, path, label)
        elif fields != {"count"}:
            self._inside(children, path, label)
        if "count" in fields:
            counter = unwrap_variable(children["count"], (*path, "count"))
            self.counts.append(counter)
            self.schedules += [counter] if fields == {"count"} else []

    def _slots(self, slots: Mapping[str, str], fields: Mapping[str, Any], path: KeyPath, label: str, sign: int) -> None:
        for slot, field in slots.items():
            names = names_of_tensors(fields[field], (*path, field))
            self.slots |= {slot_path: SlotOfParameter(name, slot, sign) for slot_path, name in names.items()}
            members = self.members.setdefault(label, [])
            members += [name for name in names.values() if name not in members]

    def _inside(self, children: Mapping[str, Any], path: KeyPath, label: str) -> None:
        """Add the children of a chain or another container of states."""
        is_scaled, last = False, [*children][-1]
        for key, child in children.items():
            fields = frozenset(dict(parts(child)))
            # RMSprop of optax has its momentum after the learning rate, with the sign of updates.
            is_after_rate = is_scaled and key == last and fields == {"trace"}
            is_scaled |= _STATES.get(fields) in _ROOT_MEAN_SQUARES
            if key != "count":
                self.read(child, (*path, key), label, -1 if is_after_rate else 1)


def unwrap_variable(tree: Any, path: KeyPath) -> KeyPath:
    """Return the path of a number, also inside a variable of NNX."""
    return (*path, WRAPPER) if isinstance(tree, Mapping) and [*tree] == [WRAPPER] else path


SECOND, LARGEST = "exp_avg_sq", "exp_inf"
"""Both are `nu` in optax: Adamax stores the largest gradients, Adam their squares."""


def of_adamax(optimizer: OptimizerState, parameters: Collection[str]) -> OptimizerState:
    """Return an optimizer of optax with slots of Adamax for the parameters that it trains."""
    slots = {
        name: {LARGEST if slot == SECOND and name in parameters else slot: value for slot, value in tensors.items()}
        for name, tensors in optimizer.slots.items()
    }
    return dataclasses.replace(optimizer, slots=slots) if optimizer.variant == "optax" else optimizer


def with_sign(tensor: Tensor, sign: int) -> Tensor:
    return tensor if sign > 0 else ComputedTensor(tensor.dtype, tensor.shape, lambda: -tensor.array())


def factors(slots: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the slots of Adafactor without the zeros that optax stores for empty ones."""
    if slots["variance"].shape == shape:
        return {"variance": slots["variance"]}
    axes = {slot: reduced_axis(slot, shape) for slot in ("row_var", "col_var")}
    if any(slots[slot].shape != shape[:axis] + shape[axis + 1 :] for slot, axis in axes.items()):
        raise InvalidModelError(f"the state of Adafactor does not fit a parameter of shape {list(shape)}")
    return {slot: reshape(slots[slot], (*shape[:axis], 1, *shape[axis + 1 :])) for slot, axis in axes.items()}


def reshape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return ComputedTensor(tensor.dtype, shape, lambda: tensor.array().reshape(shape))
