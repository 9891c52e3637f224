"""Parameter groups: optimizer, numbers, state and nodes of each parameter.

Targets of an optimizer are the parameters, or float32 copies of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.arguments import coerce
from onward.build import Builder, Expr
from onward.errors import RecipeError, UnknownNameError, list_names, suggest_or_list
from onward.recipe.layers import layers
from onward.recipe.optimizers.definition import ConfiguredOptimizer
from onward.recipe.optimizers.graph_optimizer import (
    COUNT,
    OPTIONS,
    RATE,
    FunctionOptimizer,
    change_options,
    gradient_of,
    open_function,
)
from onward.recipe.optimizers.updates import configure
from onward.recipe.spec import Spec, check_options, is_graph, parse, parse_options
from onward.recipe.step_builder import StepBuilder, fill, full_tensor
from onward.recipe.trainable import matching

_NAMED = re.compile(r"(.+?)(:)(\w+=.*)", re.DOTALL)
"""A pattern, possibly with colons, and options."""


Given = Spec | FunctionOptimizer
"""An optimizer as a recipe has it."""


@dataclasses.dataclass(frozen=True)
class OptimizerGroup:
    """Parameters that share an optimizer and its settings."""

    name: str
    optimizer: ConfiguredOptimizer | FunctionOptimizer
    parameters: list[ir.Value]

    def fact(self) -> dict[str, Any]:
        name = (
            {"name": self.optimizer.definition.name, "options": dict(self.optimizer.options)}
            if isinstance(self.optimizer, ConfiguredOptimizer)
            else {"name": self.optimizer.name, "options": {}, "is_function": True}
        )
        return {
            "group": self.name,
            **name,
            "hyper": dict(self.optimizer.values),
            "params": [value.name for value in self.parameters],
        }


def given_optimizer(given: Any) -> Given:
    """Parse the optimizer of a recipe.

    A graph is a model, a function or a file; with options it is `{"function": graph, "lr": 0.1,
    "initial": {"v": 1}}`. The defaults of a model's inputs are such options, too.
    """
    if isinstance(given, FunctionOptimizer):
        return given
    if isinstance(given, Mapping) and "function" in given:
        check_options("an optimizer that is a function", given, dict.fromkeys(OPTIONS))
        return change_options(open_function(given["function"]), given)
    return open_function(given) if is_graph(given) else parse(given)


def with_rate(spec: Any, lr: float) -> Any:
    """Return the optimizer spec with a learning rate."""
    optimizer = given_optimizer(spec)
    if isinstance(optimizer, FunctionOptimizer):
        return change_options(optimizer, {RATE: lr})
    if RATE in optimizer.options:
        raise RecipeError(f"the learning rate is given twice: {lr:g}, and in `{optimizer}`", hint="leave one out")
    return Spec(optimizer.name, {RATE: lr, **optimizer.options})


def patterns(specs: Sequence[Any]) -> list[str]:
    """Return all patterns of groups, as written."""
    return [pattern for item in specs for pattern in _parse_group(item, Spec(""))[0]]


def opset_of(default: Given, given: Sequence[Any]) -> int:
    """Return the operator set that graph optimizers need; 0 if there are none."""
    optimizers = [default, *(_parse_group(item, default)[1] for item in given)]
    return max((opt.update.opset for opt in optimizers if isinstance(opt, FunctionOptimizer)), default=0)


def groups(
    parameters: Sequence[ir.Value],
    default: Given,
    given: Sequence[Any],
    roles: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> list[OptimizerGroup]:
    """Divide parameters: each goes to the first group that matches it, the rest to the default.

    A group is `{"match": "*.bias", "weight_decay": 0}` or `*.bias:weight_decay=0`; its `optimizer`
    replaces the default, and other options change settings. `roles` maps names of roles to
    parameters.
    """
    remaining = {value.name or "": value for value in parameters}
    everything = list(remaining)
    divided: list[tuple[Given, list[ir.Value]]] = []
    for item in given:
        match, spec = _parse_group(item, default)
        if not matching(match, everything, roles):
            hint = suggest_or_list(match[0].strip("*"), everything)
            raise UnknownNameError(f"{list_names(match, 6)} matches no parameter", hint=hint)
        members = [remaining.pop(name) for name in matching(match, list(remaining), roles)]
        if not members:
            raise RecipeError(
                f"groups before `{', '.join(match)}` match all its parameters",
                hint="put it first, or leave it out: the first group that matches a parameter counts",
            )
        divided.append((spec, members))
    divided.append((default, list(remaining.values())))
    return [
        OptimizerGroup(f"group{i}", spec if isinstance(spec, FunctionOptimizer) else configure(spec), chosen)
        for i, (spec, chosen) in enumerate(item for item in divided if item[1])
    ]


def _parse_group(item: Any, default: Given) -> tuple[list[str], Given]:
    if isinstance(item, str):
        named = _NAMED.fullmatch(item)
        pattern, colon, rest = named.groups() if named else item.partition(":")
        if "=" in pattern and not colon:
            raise RecipeError(f"the group `{item}` has no pattern of parameters", hint=f"write `*.bias:{item}`")
        item = {"match": pattern, **parse_options(rest, item)}
    has_pattern = isinstance(item, Mapping) and "match" in item
    match = coerce("`match` of a group", item["match"], Sequence[str]) if has_pattern else ()
    if not match:
        raise RecipeError(f"the group {item!r} has no pattern of parameters", hint="write `*.bias:lr=1e-4`")
    changes = {key: value for key, value in item.items() if key not in ("match", "optimizer")}
    base = given_optimizer(item["optimizer"]) if "optimizer" in item else default
    if isinstance(base, FunctionOptimizer):
        return match, base if not changes else given_optimizer({"function": base, **changes})
    return match, Spec(base.name, {**base.options, **changes})


# ---- groups by depth -------------------------------------------------------------------------------------------------


_FIRST, _LAST = "first", "last"


def divide_by_depth(groups: Sequence[OptimizerGroup], graph: ir.Graph, decay: float) -> list[OptimizerGroup]:
    """Divide groups by depth: the rate of a block is `decay` times that of the next block."""
    depth_of = depths(graph, [value for group in groups for value in group.parameters])
    divided: list[OptimizerGroup] = []
    for group in groups:
        optimizer = group.optimizer
        if isinstance(optimizer, FunctionOptimizer):
            raise RecipeError(
                f"`lr_decay` cannot divide the optimizer `{optimizer.name}`, which updates all parameters at once",
                hint="leave `lr_decay` out",
            )
        for depth in sorted({depth_of[value] for value in group.parameters}):
            values = {**optimizer.values, RATE: optimizer.values[RATE] * decay**depth}
            members = [value for value in group.parameters if depth_of[value] == depth]
            slower = dataclasses.replace(optimizer, values=values)
            divided.append(OptimizerGroup(f"group{len(divided)}", slower, members))
    return divided


def depths(graph: ir.Graph, parameters: Sequence[ir.Value]) -> dict[ir.Value, int]:
    """Return the number of blocks behind the block of each parameter."""
    position = {node: i for i, node in enumerate(graph.all_nodes())}
    first = {
        value: min((position[node] for node in value.consumers() if node in position), default=len(position))
        for value in parameters
    }
    named = {layer.weight: layer.module for layer in layers(graph)}
    marks: dict[ir.Value, object] = {value: _block(named.get(value) or value.name or "") for value in parameters}
    is_numbered = any(mark is not None for mark in marks.values())
    if not is_numbered:
        marks = {value: first[value] if value.shape is not None and len(value.shape) > 1 else None for value in marks}
    in_order = sorted(parameters, key=lambda value: (first[value], marks[value] is None))
    last = max((i for i, value in enumerate(in_order) if marks[value] is not None), default=-1)
    current: object = _FIRST
    blocks: dict[object, list[ir.Value]] = {}
    for i, value in enumerate(in_order):
        if marks[value] is not None:
            current = marks[value]
        elif is_numbered and i > last:
            current = _LAST
        blocks.setdefault(current, []).append(value)
    return {value: depth for depth, block in enumerate(reversed(blocks.values())) for value in block}


def _block(name: str) -> str | None:
    """Return `encoder.layer.3` of `encoder.layer.3.query.weight`, also of `layer1.layer1.0.conv`."""
    plain = re.sub(r"(^|\.)(\w+)\.\2\.(?=\d)", r"\1\2.", name)
    match = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", plain)
    return match[0] if match else None


# ---- state and nodes of a training step ------------------------------------------------------------------------------


Targets = Mapping[ir.Value, ir.Value]
"""Parameter -> the tensor that the optimizer updates."""


def declare_state(builder: StepBuilder, group: OptimizerGroup, targets: Targets) -> _PerParameter | _WholeGroup:
    """Declare the state of a group."""
    if isinstance(group.optimizer, FunctionOptimizer):
        return _WholeGroup(builder, group, group.optimizer, targets)
    return _PerParameter(builder, group, group.optimizer, targets)


class _PerParameter:
    """An optimizer of the table, which updates one parameter at a time."""

    def __init__(self, builder: StepBuilder, group: OptimizerGroup, optimizer: ConfiguredOptimizer, targets: Targets):
        self._builder = builder
        self._group = group
        self._optimizer = optimizer
        self._targets = targets
        self._slots = {value: self._declare(value) for value in group.parameters}

    def _declare(self, value: ir.Value) -> dict[str, ir.Value]:
        slots = {}
        for slot in self._optimizer.slots(self._targets[value]):
            state = self._builder.state(
                f"{value.name}/{slot.name}",
                full_tensor(slot.initial, slot.dtype, slot.shape),
                lambda op, slot=slot: fill(op, slot.initial, slot.dtype, slot.shape),  # type: ignore[misc]
                role="optimizer_state",
                param=value.name,
                slot=slot.name,
                group=self._group.name,
            )
            slots[slot.name] = state.value
        return slots

    def new_state(self, op: Builder, gradients: Mapping[ir.Value, Expr], rate: Expr, t: Expr) -> dict[str, Expr]:
        """Append an update of the group; return its new state by name, with the parameters."""
        new: dict[str, Expr] = {}
        for value in self._group.parameters:
            new |= self._updated(op.scoped(value.name or ""), value, gradients[value], rate, t)
        return new

    def _updated(self, op: Builder, value: ir.Value, gradient: Expr, rate: Expr, t: Expr) -> dict[str, Expr]:
        target, group, optimizer = self._targets[value], self._group.name, self._optimizer
        gradient = like_target(op, gradient, target)
        hyper = {
            key: op(self._builder.hyper(f"{group}/{key}", optimizer.values[key], group).value)
            for key in optimizer.inputs(target)
        }
        slots = {slot: op(state) for slot, state in self._slots[value].items()}
        x, after = optimizer.update(op, op(target), op(gradient.value), slots, lr=rate, t=t, hyper=hyper)
        return {**_new_values(op, x, value, target), **{f"{value.name}/{slot}": expr for slot, expr in after.items()}}


class _WholeGroup:
    """An optimizer that is a function of all parameters of the group."""

    def __init__(self, builder: StepBuilder, group: OptimizerGroup, optimizer: FunctionOptimizer, targets: Targets):
        self._parameters = {value.name or "": value for value in group.parameters}
        self._targets = targets
        self._optimizer = optimizer.bind({name: targets[value] for name, value in self._parameters.items()})
        self._group = group.name
        self._state = {value.name or "": self._declare(builder, value) for value in self._optimizer.state}
        self._function = self._optimizer.define(builder.model.functions, builder.model.opset)

    def _name(self, state: str) -> str:
        return state if self._optimizer.owner_of(state) else f"{self._group}/{state}"

    def _declare(self, builder: StepBuilder, value: ir.Value) -> ir.Value:
        name, owner = value.name or "", self._optimizer.owner_of(value.name or "")
        if value.dtype is None or value.shape is None or not value.shape.is_static():
            raise RecipeError(
                f"type or shape of the state `{value.name}` of `{self._optimizer.name}` is unknown",
                hint="declare both with the inputs of the function",
            )
        initial = self._optimizer.initial.get(value.name or "", np.zeros(()))
        initial = np.broadcast_to(initial.astype(value.dtype.numpy()), tuple(value.shape.numpy()))
        state = builder.state(
            self._name(name),
            ir.Tensor(initial),
            lambda op: _reset(op, initial),
            role="optimizer_state",
            param=owner,
            slot=name.removeprefix(f"{owner}/"),
            group=self._group,
        )
        return state.value

    def new_state(self, op: Builder, gradients: Mapping[ir.Value, Expr], rate: Expr, t: Expr) -> dict[str, Expr]:
        op = op.scoped(self._group)
        arguments: dict[str, Expr] = {RATE: rate, COUNT: t, **{name: op(value) for name, value in self._state.items()}}
        for name, value in self._parameters.items():
            target = self._targets[value]
            arguments |= {name: op(target), gradient_of(name): like_target(op, gradients[value], target)}
        inputs = []
        for value in self._optimizer.inputs:
            expr = arguments[value.name or ""]
            inputs.append(expr if value.dtype in (None, expr.dtype) else op.Cast(expr, to=value.dtype))
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
    """Cast a gradient to the type of the updated tensor, for scaling, accumulation and clipping."""
    return gradient if gradient.dtype == target.dtype else op.Cast(gradient, to=target.dtype)


def _new_values(op: Builder, x: Expr, value: ir.Value, target: ir.Value) -> dict[str, Expr]:
    name = value.name or ""
    return {name: x} if target is value else {name: op.Cast(x, to=value.dtype), f"{name}/master": x}


def _reset(op: Builder, initial: np.ndarray) -> Expr:
    if initial.size and (initial == initial.flat[0]).all():
        return fill(op, initial.flat[0], ir.DataType.from_numpy(initial.dtype), initial.shape)
    return op.Identity(op.constant(initial))
