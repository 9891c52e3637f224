"""Traces of optimizers as functions, one per group of parameters, or one for coupled groups."""

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
from onward.frameworks.torch.traced.trace import Trace, is_rate, trace, trace_similar
from onward.lowering.optimize import optimize
from onward.model import Model
from onward.model.walk import ancestors, is_random
from onward.recipe.optimizers import FunctionOptimizer
from onward.recipe.optimizers.graph_optimizer import RATE, gradient_of, name_inputs
from onward.run_state.state import ParameterGroup
from onward.transform.context import Context


class TracedFunction(NamedTuple):
    """Function, and the paths of its state in the optimizer."""

    function: FunctionOptimizer
    places: Mapping[str, Path]
    group: int
    """Index of the group whose learning rate it takes."""


def try_out(optimizer: Optimizer, trained: Mapping[int, str], side: TracedFunction) -> None:
    """Compare steps of a function with the optimizer, each from the same state."""
    copied = copy_optimizer(optimizer)
    parameters_by_name = {name: parameters_of(copied)[i] for i, name in trained.items()}
    rates = [float(group[RATE]) for group in copied.param_groups]
    function = dataclasses.replace(side.function, lr=rates[side.group])

    def parameters() -> dict[str, np.ndarray]:
        return {name: to_array(parameter).copy() for name, parameter in parameters_by_name.items()}

    def step(trial: Trial) -> Arrays:
        for name, parameter in parameters_by_name.items():
            parameter.grad = from_array(trial.gradients[name]).to(parameter)
        for group, rate in zip(copied.param_groups, rates, strict=True):
            group[RATE] = rate * trial.factor
        with torch.random.fork_rng():
            step_of(copied)()
        leaves, after = leaves_of(copied), parameters()
        for name, path in side.places.items():
            leaf = leaves[("state", next(iter(trained)), *path[1:]) if path[0] == "each" else path]
            after[name] = to_array(leaf).copy() if isinstance(leaf, Tensor) else np.asarray(leaf, np.float64)
        return after

    start = {**parameters(), **function.initial}
    compare_updates(update_by(function), step, start, parameters_by_name, optimizer=f"the optimizer {function.name}")


def trace_groups(
    optimizer: Optimizer, names: Mapping[int, str], rates: Sequence[float]
) -> tuple[list[ParameterGroup], int]:
    """Return the groups of an optimizer of any class, by tracing a step, and its updates so far, or 0.

    `names` are those of the trained parameters by `id`, `rates` the initial learning rates. The
    trace is compared with the optimizer.
    """
    trained = {i: names[id(p)] for i, p in enumerate(parameters_of(optimizer)) if id(p) in names and p.requires_grad}
    ready = with_initial_state(optimizer, trained)
    if (alike := trace_similar(ready, list(trained))) is not None:
        with contextlib.suppress(MismatchError):  # where parameters that are alike are not treated alike
            return _try_trace(optimizer, trained, alike, rates)
    return _try_trace(optimizer, trained, trace(ready, list(trained)), rates)


def _try_trace(
    optimizer: Optimizer, trained: Mapping[int, str], trace_of_step: Trace, rates: Sequence[float]
) -> tuple[list[ParameterGroup], int]:
    _clean(trace_of_step.model)
    group_of = [i for i, group in enumerate(optimizer.param_groups) for _ in group["params"]]
    sides = _FunctionMaker(type(optimizer).__name__, trace_of_step, trained, group_of, rates).functions()
    for side in sides:
        try_out(optimizer, trained, side)
    count = trace_of_step.state.get(("each", "step"))
    groups = [ParameterGroup(side.function, side.function.parameters) for side in sides]
    return groups, 0 if count is None else int(count)


def _clean(model: Model) -> None:
    """Simplify a graph in place: copies for each parameter may be equal."""
    graph = model.graph
    if any(is_random(node) for node in graph.all_nodes()):
        raise UnsupportedError(
            "a step of the optimizer draws random numbers, which differ between frameworks",
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
        node.metadata_props.clear()  # local paths of the code
        if node.op_type == "Identity" and not node.outputs[0].is_graph_output() and node.inputs[0] is not None:
            node.outputs[0].replace_all_uses_with(node.inputs[0])
    optimize(Context(model))


@dataclasses.dataclass
class _FunctionMaker:
    name: str
    trace: Trace
    trained: Mapping[int, str]
    group_of: Sequence[int]
    rates: Sequence[float]

    def functions(self) -> list[TracedFunction]:
        """Return one function per group, or one for all if groups depend on each other."""
        indices = list(dict.fromkeys(self.group_of[i] for i in self.trained))
        if all(map(self._stands_alone, indices)):
            return [self._function([index]) for index in indices]
        return [self._function(indices)]

    def _owner(self, path: Path) -> int | None:
        """Return the group of a path, or None if it belongs to the whole optimizer."""
        if path[0] in ("parameter", "gradient") or (path[0] == "state" and isinstance(path[1], int)):
            return self.group_of[path[1]]
        return path[1] if path[0] == "group" else None

    def _stands_alone(self, index: int) -> bool:
        """True if a group does not depend on another."""
        graph = self.trace.model.graph
        results = [
            result
            for path, result in zip(self.trace.results, graph.outputs, strict=True)
            if self._owner(path) in (index, None)
        ]
        _, reached = ancestors(results)
        read = (path for path, value in zip(self.trace.places, graph.inputs, strict=True) if value in reached)
        return all(self._owner(path) in (index, None) for path in read)

    def _function(self, indices: Sequence[int]) -> TracedFunction:
        model = self.trace.model.copy()
        graph = model.graph
        graph.name = self.name
        inputs = dict(zip(self.trace.places, graph.inputs, strict=True))
        results = dict(zip(self.trace.results, graph.outputs, strict=True))
        paths = [p for p in self.trace.places if self._owner(p) in (*indices, None) and not is_rate(p)]
        rate = _one_rate(model, [inputs["group", i, RATE] for i in indices], [self.rates[i] for i in indices])
        graph.outputs[:] = [results[path] for path in paths if path in results]
        graph.inputs[:] = [rate, *(inputs[path] for path in paths)]
        optimize(Context(model))
        name_inputs(model, [RATE, *(self._named(path, len(indices) == 1) for path in paths)])
        paths_of_state = {inputs[path].name or "": path for path in self.trace.state if path in paths}
        initial = {name: to_array(self.trace.state[path]).copy() for name, path in paths_of_state.items()}
        function = FunctionOptimizer(self.name, model, self.rates[indices[0]], initial)
        function.check()
        return TracedFunction(function, paths_of_state, indices[0])

    def _named(self, path: Path, is_alone: bool) -> str:
        """Return the name of an input, as in `recipe.optimizers.graph_optimizer`."""
        slot = ".".join(str(key) for key in path[2:]).replace("/", ".")
        match path:
            case ("parameter", i):
                return self.trained[i]
            case ("gradient", i):
                return gradient_of(self.trained[i])
            case ("state", int(i), *_):
                return f"{self.trained[i]}/{slot}"
            case ("group", i, *_):
                return slot if is_alone else f"{slot}.{i}"
            case _:
                return ".".join(str(key) for key in path[1:]).replace("/", ".")


def _one_rate(model: Model, inputs: Sequence[ir.Value], rates: Sequence[float]) -> ir.Value:
    """Replace several learning rates by multiples of one."""
    first = ir.Value(name=RATE, type=inputs[0].type, shape=ir.Shape([]))
    rates_graph = ir.Graph([], [], nodes=[], opset_imports={"": model.opset}, name="rates")
    op = Builder(rates_graph, opset=model.opset, names=model.names())
    for value, rate in zip(inputs, rates, strict=True):
        multiple = first if rate == rates[0] else op.Mul(first, op.constant(np.float64(rate / rates[0]))).value
        value.replace_all_uses_with(multiple)
    nodes = list(rates_graph)
    rates_graph.remove(nodes)
    for node in reversed(nodes):
        model.graph.insert_before(model.graph[0], node)
    return first
