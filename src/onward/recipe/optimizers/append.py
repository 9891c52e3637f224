"""How the optimizer of a group becomes state and nodes of a training step.

What an optimizer works on, its targets, are the parameters, or float32 copies of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import RecipeError
from onward.recipe.assembly import Assembly, fill, full_tensor
from onward.recipe.optimizers.configuration import ConfiguredOptimizer
from onward.recipe.optimizers.graph_optimizer import COUNT, RATE, FunctionOptimizer, gradient_of
from onward.recipe.optimizers.groups import Group

Targets = Mapping[ir.Value, ir.Value]
"""Parameter -> what the optimizer works on."""


class Appended(Protocol):
    """A group with its state declared."""

    def new_state(self, op: Builder, gradients: Mapping[ir.Value, Expr], rate: Expr, t: Expr) -> dict[str, Expr]:
        """Append an update of the group: its new state by name, parameters among it."""


def declare_state(assembly: Assembly, group: Group, targets: Targets) -> Appended:
    """Declare the state of a group."""
    if isinstance(group.optimizer, FunctionOptimizer):
        return _AtOnce(assembly, group, group.optimizer, targets)
    return _OneByOne(assembly, group, group.optimizer, targets)


class _OneByOne:
    """An optimizer of the table, which looks at one parameter at a time."""

    def __init__(self, assembly: Assembly, group: Group, optimizer: ConfiguredOptimizer, targets: Targets):
        self._assembly = assembly
        self._group = group
        self._optimizer = optimizer
        self._targets = targets
        self._slots = {value: self._declare(value) for value in group.parameters}

    def _declare(self, value: ir.Value) -> dict[str, ir.Value]:
        found = {}
        for slot in self._optimizer.slots(self._targets[value]):
            state = self._assembly.state(
                f"{value.name}/{slot.name}",
                full_tensor(slot.initial, slot.dtype, slot.shape),
                lambda op, slot=slot: fill(op, slot.initial, slot.dtype, slot.shape),  # type: ignore[misc]
                role="optimizer_state",
                param=value.name,
                slot=slot.name,
                group=self._group.name,
            )
            found[slot.name] = state.value
        return found

    def new_state(self, op: Builder, gradients: Mapping[ir.Value, Expr], rate: Expr, t: Expr) -> dict[str, Expr]:
        new: dict[str, Expr] = {}
        for value in self._group.parameters:
            new |= self._updated(op.scoped(value.name or ""), value, gradients[value], rate, t)
        return new

    def _updated(self, op: Builder, value: ir.Value, gradient: Expr, rate: Expr, t: Expr) -> dict[str, Expr]:
        target, group, optimizer = self._targets[value], self._group.name, self._optimizer
        gradient = like_target(op, gradient, target)
        hyper = {
            key: op(self._assembly.hyper(f"{group}/{key}", optimizer.values[key], group).value)
            for key in optimizer.inputs(target)
        }
        slots = {slot: op(state) for slot, state in self._slots[value].items()}
        x, after = optimizer.update(op, op(target), op(gradient.value), slots, lr=rate, t=t, hyper=hyper)
        return {**_new_values(op, x, value, target), **{f"{value.name}/{slot}": expr for slot, expr in after.items()}}


class _AtOnce:
    """An optimizer that is a function of all parameters of the group."""

    def __init__(self, assembly: Assembly, group: Group, optimizer: FunctionOptimizer, targets: Targets):
        self._parameters = {value.name or "": value for value in group.parameters}
        self._targets = targets
        self._optimizer = optimizer.bind({name: targets[value] for name, value in self._parameters.items()})
        self._group = group.name
        self._state = {value.name or "": self._declare(assembly, value) for value in self._optimizer.state}
        self._function = self._optimizer.define(assembly.model.functions, assembly.model.opset)

    def _name(self, state: str) -> str:
        """What a state is called in the training model."""
        return state if self._optimizer.owner_of(state) else f"{self._group}/{state}"

    def _declare(self, assembly: Assembly, value: ir.Value) -> ir.Value:
        name, owner = value.name or "", self._optimizer.owner_of(value.name or "")
        initial = self._initial(value)
        state = assembly.state(
            self._name(name),
            ir.Tensor(initial),
            lambda op: _reset(op, initial),
            role="optimizer_state",
            param=owner,
            slot=name.removeprefix(f"{owner}/"),
            group=self._group,
        )
        return state.value

    def _initial(self, value: ir.Value) -> np.ndarray:
        if value.dtype is None or value.shape is None or not value.shape.is_static():
            raise RecipeError(
                f"type or shape of the state `{value.name}` of the optimizer `{self._optimizer.name}` is not known",
                hint="declare both with the inputs of the function",
            )
        initial = self._optimizer.initial.get(value.name or "", np.zeros(()))
        return np.broadcast_to(initial.astype(value.dtype.numpy()), tuple(value.shape.numpy()))

    def new_state(self, op: Builder, gradients: Mapping[ir.Value, Expr], rate: Expr, t: Expr) -> dict[str, Expr]:
        op = op.scoped(self._group)
        given: dict[str, Expr] = {RATE: rate, COUNT: t, **{name: op(value) for name, value in self._state.items()}}
        for name, value in self._parameters.items():
            target = self._targets[value]
            given |= {name: op(target), gradient_of(name): like_target(op, gradients[value], target)}
        inputs = [_as_declared(op, given[value.name or ""], value) for value in self._optimizer.inputs]
        names = [*self._optimizer.parameters, *self._state]
        results = op.node(self._function.domain, self._function.name, *inputs, outputs=len(names))
        new: dict[str, Expr] = {}
        for name, result in zip(names, results if isinstance(results, tuple) else (results,), strict=True):
            if name in self._parameters:
                value = self._parameters[name]
                new |= _new_values(op, result.like(self._targets[value]), value, self._targets[value])
            else:
                new[self._name(name)] = result.like(self._state[name])
        return new


def like_target(op: Builder, gradient: Expr, target: ir.Value) -> Expr:
    """A gradient in the type of what the optimizer works on: it is scaled, added up and clipped in that."""
    return gradient if gradient.dtype == target.dtype else op.Cast(gradient, to=target.dtype)


def _new_values(op: Builder, x: Expr, value: ir.Value, target: ir.Value) -> dict[str, Expr]:
    """A parameter, and the copy that the optimizer works on."""
    name = value.name or ""
    return {name: x} if target is value else {name: op.Cast(x, to=value.dtype), f"{name}/master": x}


def _as_declared(op: Builder, expr: Expr, declared: ir.Value) -> Expr:
    """The rate and the counter in the type that a function takes."""
    return expr if declared.dtype in (None, expr.dtype) else op.Cast(expr, to=declared.dtype)


def _reset(op: Builder, initial: np.ndarray) -> Expr:
    if initial.size and (initial == initial.flat[0]).all():
        return fill(op, initial.flat[0], ir.DataType.from_numpy(initial.dtype), initial.shape)
    return op.Identity(op.constant(initial))
