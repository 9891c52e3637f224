"""The trace of an optimizer as functions: one for each group of parameters, or one where groups are coupled."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from torch.optim import Optimizer

from onward.agreement.steps import Trial, compare_updates, update_by
from onward.agreement.tolerance import Arrays
from onward.build import Builder
from onward.engines.torch.types import from_array, to_array
from onward.errors import MismatchError, UnsupportedError
from onward.frameworks.torch.traced.optimizer_state import (
    Path,
    copy_optimizer,
    leaves_of,
    parameters_of,
    step_of,
    with_initial_state,
)
from onward.frameworks.torch.traced.trace import Trace, is_rate, trace, traced_alike
from onward.lowering.optimize import optimize
from onward.model import Model
from onward.model.walk import ancestors, is_random
from onward.recipe.optimizers import FunctionOptimizer
from onward.recipe.optimizers.graph_optimizer import RATE, gradient_of, name_inputs
from onward.run_state.state import ParameterGroup
from onward.transform.context import Context


class Side(NamedTuple):
    """A function, and where the optimizer holds what it takes as state."""

    function: FunctionOptimizer
    places: Mapping[str, Path]
    group: int
    """The group whose learning rate it takes."""


def try_out(optimizer: Optimizer, trained: Mapping[int, str], side: Side) -> None:
    """Compare some steps, each from the same state. Neither side is changed."""
    theirs = copy_optimizer(optimizer)
    held = {name: parameters_of(theirs)[i] for i, name in trained.items()}
    rates = [float(group[RATE]) for group in theirs.param_groups]
    function = dataclasses.replace(side.function, lr=rates[side.group])

    def parameters() -> dict[str, np.ndarray]:
        return {name: to_array(parameter).copy() for name, parameter in held.items()}

    def step(trial: Trial) -> Arrays:
        for name, parameter in held.items():
            parameter.grad = from_array(trial.gradients[name]).to(parameter)
        for group, rate in zip(theirs.param_groups, rates, strict=True):
            group[RATE] = rate * trial.factor
        with torch.random.fork_rng():
            step_of(theirs)()
        leaves, after = leaves_of(theirs), parameters()
        for name, place in side.places.items():
            leaf = leaves[("state", next(iter(trained)), *place[1:]) if place[0] == "each" else place]
            after[name] = to_array(leaf).copy() if isinstance(leaf, Tensor) else np.asarray(leaf, np.float64)
        return after

    start = {**parameters(), **function.initial}
    compare_updates(update_by(function), step, start, held, optimizer=f"the optimizer {function.name}")


def trace_groups(
    optimizer: Optimizer, names: Mapping[int, str], rates: Sequence[float]
) -> tuple[list[ParameterGroup], int]:
    """The groups of an optimizer of any class, by tracing a step of it; `rates` are what its groups begin with.

    The second result is the updates that it says it has made, or 0.

    `names` are those of the parameters that are trained, by `id`. What was traced is compared with the optimizer.
    """
    trained = {i: names[id(p)] for i, p in enumerate(parameters_of(optimizer)) if id(p) in names and p.requires_grad}
    ready = with_initial_state(optimizer, trained)
    if (alike := traced_alike(ready, list(trained))) is not None:
        with contextlib.suppress(MismatchError):  # where parameters that are alike are not treated alike
            return _try_trace(optimizer, trained, alike, rates)
    return _try_trace(optimizer, trained, trace(ready, list(trained)), rates)


def _try_trace(
    optimizer: Optimizer, trained: Mapping[int, str], found: Trace, rates: Sequence[float]
) -> tuple[list[ParameterGroup], int]:
    _clean(found.model)
    group_of = [i for i, group in enumerate(optimizer.param_groups) for _ in group["params"]]
    sides = _Making(type(optimizer).__name__, found, trained, group_of, rates).functions()
    for side in sides:
        try_out(optimizer, trained, side)
    count = found.state.get(("each", "step"))
    groups = [ParameterGroup(side.function, side.function.parameters) for side in sides]
    return groups, 0 if count is None else int(count)


def _clean(model: Model) -> None:
    """Shorten a graph in place: what was written once for each parameter may be the same for all."""
    graph = model.graph
    if any(is_random(node) for node in graph.all_nodes()):
        raise UnsupportedError(
            "a step of the optimizer draws random numbers, which no two frameworks draw alike",
            hint="use an optimizer without noise",
        )
    for name, value in list(graph.initializers.items()):
        assert value.const_value is not None
        tensor = ir.Tensor(value.const_value.numpy().copy(), dtype=value.const_value.dtype)
        constant = ir.node("Constant", [], attributes={"value": tensor}, name=name)
        constant.outputs[0].type, constant.outputs[0].shape = value.type, value.shape
        graph.insert_before(graph[0], constant)
        value.replace_all_uses_with(constant.outputs[0])
        graph.initializers.pop(name)
        constant.outputs[0].name = name
    for node in graph.all_nodes():
        node.metadata_props.clear()  # which says where on somebody's disk the code is
        if node.op_type == "Identity" and not node.outputs[0].is_graph_output() and node.inputs[0] is not None:
            node.outputs[0].replace_all_uses_with(node.inputs[0])
    optimize(Context(model))


class _Making:
    def __init__(
        self, name: str, found: Trace, trained: Mapping[int, str], group_of: Sequence[int], rates: Sequence[float]
    ):
        self._name = name
        self._found = found
        self._trained = trained
        self._group_of = group_of
        self._rates = rates
        self._places = found.places
        self._indices = list(dict.fromkeys(group_of[i] for i in trained))

    def functions(self) -> list[Side]:
        if all(self._stands_alone(index) for index in self._indices):
            return [self._function([index]) for index in self._indices]
        return [self._function(self._indices)]

    def _owner(self, place: Path) -> int | None:
        """The group that something belongs to; None where it is of the optimizer as a whole."""
        if place[0] in ("parameter", "gradient") or (place[0] == "state" and isinstance(place[1], int)):
            return self._group_of[place[1]]
        return place[1] if place[0] == "group" else None

    def _stands_alone(self, index: int) -> bool:
        """Whether a group depends on nothing of another."""
        graph = self._found.model.graph
        own = [
            r
            for place, r in zip(self._found.results, graph.outputs, strict=True)
            if self._owner(place) in (index, None)
        ]
        _, reached = ancestors(own)
        read = (place for place, value in zip(self._places, graph.inputs, strict=True) if value in reached)
        return all(self._owner(place) in (index, None) for place in read)

    def _function(self, indices: Sequence[int]) -> Side:
        model = self._found.model.copy()
        graph = model.graph
        graph.name = self._name
        inputs = dict(zip(self._places, graph.inputs, strict=True))
        results = dict(zip(self._found.results, graph.outputs, strict=True))
        own = [p for p in self._places if self._owner(p) in (*indices, None) and not is_rate(p)]
        rate = _one_rate(model, [inputs["group", i, RATE] for i in indices], [self._rates[i] for i in indices])
        graph.outputs[:] = [results[place] for place in own if place in results]
        graph.inputs[:] = [rate, *(inputs[place] for place in own)]
        optimize(Context(model))
        name_inputs(model, [RATE, *(self._named(place, len(indices) == 1) for place in own)])
        places = {inputs[place].name or "": place for place in self._found.state if place in own}
        initial = {name: to_array(self._found.state[place]).copy() for name, place in places.items()}
        made = FunctionOptimizer(self._name, model, self._rates[indices[0]], initial)
        made.check()
        return Side(made, places, indices[0])

    def _named(self, place: Path, is_alone: bool) -> str:
        """The name of an input: see `recipe.optimizers.function`."""
        slot = ".".join(str(part) for part in place[2:]).replace("/", ".")
        match place:
            case ("parameter", i):
                return self._trained[i]
            case ("gradient", i):
                return gradient_of(self._trained[i])
            case ("state", int(i), *_):
                return f"{self._trained[i]}/{slot}"
            case ("group", i, *_):
                return slot if is_alone else f"{slot}.{i}"
            case _:
                return ".".join(str(part) for part in place[1:]).replace("/", ".")


def _one_rate(model: Model, inputs: Sequence[ir.Value], rates: Sequence[float]) -> ir.Value:
    """One learning rate in place of several, of which the others are multiples."""
    first = ir.Value(name=RATE, type=inputs[0].type, shape=ir.Shape([]))
    before = ir.Graph([], [], nodes=[], opset_imports={"": model.opset}, name="rates")
    op = Builder(before, opset=model.opset, names=model.names())
    for value, rate in zip(inputs, rates, strict=True):
        same = rate == rates[0]
        value.replace_all_uses_with(first if same else op.Mul(first, op.constant(np.float64(rate / rates[0]))).value)
    nodes = list(before)
    before.remove(nodes)
    for node in reversed(nodes):
        model.graph.insert_before(model.graph[0], node)
    return first
