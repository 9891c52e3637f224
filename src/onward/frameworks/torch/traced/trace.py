"""Trace of an optimizer step as a graph from parameters, gradients and state to new ones.

A trace takes up to a second per parameter. So one of several similar parameters is traced, and the
others are copied from it; a comparison of steps checks that they are treated alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from torch.optim import Optimizer

from onward.build import copy_node
from onward.errors import UnsupportedError
from onward.frameworks.torch.exporter import export_function
from onward.frameworks.torch.traced.optimizer_state import (
    Leaves,
    Path,
    is_number,
    is_scalar,
    leaves_of,
    parameters_of,
    shell_of,
    step_of,
)
from onward.frameworks.torch.traced.symbolic_numbers import Numbers, shadow_builtins
from onward.model import Model
from onward.model.walk import ancestors, descendants, nested_graphs
from onward.recipe.optimizers.graph_optimizer import RATE

_MOST_BRANCHES = 16
"""Ways through a step that are traced. Each one is a copy of the step in the graph."""
_SLOWER = {"foreach": False, "fused": False}
"""Settings for optimizers with several implementations."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """Graph of a step, with the meaning of its inputs and outputs."""

    model: Model
    """Graph from parameters, gradients, learning rates and state to new parameters and state."""
    trained: list[int]
    """Indices of the parameters in the optimizer."""
    rates: list[Path]
    state: dict[Path, Tensor]
    """Path -> value of state. `("each", "step")` is a number that all parameters share."""

    @property
    def places(self) -> list[Path]:
        """Return the meaning of each input."""
        own = [(role, i) for role in ("parameter", "gradient") for i in self.trained]
        return [*own, *self.rates, *self.state]

    @property
    def results(self) -> list[Path]:
        """Return the meaning of each output."""
        return [*(("parameter", i) for i in self.trained), *self.state]


def trace(optimizer: Optimizer, trained: Sequence[int], among: Sequence[int] | None = None) -> Trace:
    """Return the trace of a step of an optimizer with complete state, which is not changed.

    `trained` are indices of the parameters with gradients, `among` others that share numbers.
    """
    varying: set[Path] = set()
    shared = True
    while True:
        step = _Step(optimizer, trained, varying, among or trained if shared else ())
        try:
            model = export_function(step, tuple(step.examples), f"a step of {type(optimizer).__name__}")
            return Trace(model, list(trained), list(step.rates), step.state)
        except _Varies as signal:
            varying |= signal.paths
        except _NotShared:
            shared = False


class _Varies(BaseException):
    """Signal that numbers change with each step. The exporter would catch an Exception."""

    def __init__(self, paths: set[Path]):
        self.paths = paths


class _NotShared(BaseException):
    """Signal that equal numbers of parameters do not stay equal."""


class _Step:
    """Optimizer step as a function from tensors to tensors."""

    def __init__(self, optimizer: Optimizer, trained: Sequence[int], varying: set[Path], sharing: Sequence[int]):
        self._optimizer = optimizer
        self._trained = trained
        self._branches = 0
        self._leaves = leaves_of(optimizer)
        self._inputs = {
            path: shared_path(path, self._leaves, sharing) for path in self._leaves if self._is_input(path, varying)
        }
        tensors = {shared: tensor_of(self._leaves[path]) for path, shared in self._inputs.items()}
        self.rates = {path: tensor for path, tensor in tensors.items() if is_rate(path)}
        self.state = {path: tensor for path, tensor in tensors.items() if not is_rate(path)}
        parameters = [parameters_of(optimizer)[i].detach() for i in trained]
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        self.examples = [*parameters, *gradients, *self.rates.values(), *self.state.values()]

    def _is_input(self, path: Path, varying: set[Path]) -> bool:
        leaf = self._leaves[path]
        if path[0] == "state" and isinstance(path[1], int) and path[1] not in self._trained:
            return False
        varies = is_rate(path) or path in varying or (path[0] == "state" and is_number(leaf))
        return isinstance(leaf, Tensor) or (is_scalar(leaf) and varies)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        self._branches = 0
        return self._explore(tensors, {})

    def _explore(self, tensors: Sequence[Tensor], answers: dict[object, bool]) -> list[Tensor]:
        """Return the results for all answers to unanswered questions."""
        self._branches += 1
        if self._branches > _MOST_BRANCHES:
            raise UnsupportedError(
                f"a step branches on values of tensors in more than {_MOST_BRANCHES} ways",
                hint="choose by `torch.where`",
            )
        results, asked = self._run(tensors, answers)
        asked = [question for question in asked if question.key not in answers]
        for i, question in reversed(list(enumerate(asked))):
            before = {other.key: True for other in asked[:i]}
            others = self._explore(tensors, {**answers, **before, question.key: False})
            condition = question.condition.reshape(()).to(torch.bool)
            results = [torch.where(condition, yes, no) for yes, no in zip(results, others, strict=True)]
        return results

    def _run(self, tensors: Sequence[Tensor], answers: dict[object, bool]) -> tuple[list[Tensor], list[Any]]:
        """Return the results for these answers, and the questions asked."""
        count = len(self._trained)
        parameters = dict(zip(self._trained, (x.clone() for x in tensors[:count]), strict=True))
        gradients = list(zip(parameters.values(), (x.clone() for x in tensors[count : 2 * count]), strict=True))
        values = dict(zip((*self.rates, *self.state), tensors[2 * count :], strict=True))
        clones = {path: values[shared].clone() for path, shared in self._inputs.items()}
        numbers = [(shared, clones[path]) for path, shared in self._inputs.items() if clones[path].ndim == 0]

        def new(path: Path, leaf: Any) -> Any:
            return clones.get(path, _SLOWER.get(path[-1], leaf) if path[0] == "group" else leaf)

        shell = shell_of(self._optimizer, parameters, new)
        with shadow_builtins(type(shell)), Numbers(numbers, gradients, answers) as mode:
            step_of(shell)()
        return [*parameters.values(), *self._new_state(leaves_of(shell), mode)], mode.asked

    def _new_state(self, after: Leaves, mode: Numbers) -> list[Tensor]:
        constants = self._leaves.keys() - self._inputs.keys()
        varying = {
            path for path in constants if path[-1] not in _SLOWER and _differs(self._leaves[path], after.get(path))
        }
        for path in varying:
            if not is_scalar(self._leaves[path]):
                raise _refusal(path, "a step changes it, but it is not a tensor or a number")
        if varying:
            raise _Varies(varying)
        if any(mode.key(after[path]) != path for path in self.rates):
            raise UnsupportedError("a step changes its own learning rate", hint="use a scheduler")
        new: dict[Path, Tensor] = {}
        for path, path_of_input in self._inputs.items():
            if is_rate(path):
                continue
            if path not in after or not (isinstance(after[path], Tensor) or is_scalar(after[path])):
                raise _refusal(path, "a step leaves no tensor there")
            result, example = tensor_of(after[path]), self.state[path_of_input]
            if result.shape != example.shape:
                raise _refusal(path, "a step changes its shape")
            if path_of_input in new and mode.key(after[path]) != mode.key(new[path_of_input]):
                raise _NotShared
            new.setdefault(path_of_input, after[path] if isinstance(after[path], Tensor) else result)
        return [new[path_of_input].to(example.dtype).clone() for path_of_input, example in self.state.items()]


def shared_path(path: Path, leaves: Leaves, sharing: Sequence[int]) -> Path:
    """Return the path of a number that these parameters share, else the path itself."""
    leaf = leaves[path]
    if path[0] != "state" or path[1] not in sharing:
        return path
    others = [leaves.get(("state", i, *path[2:])) for i in sharing]
    return ("each", *path[2:]) if all(_are_equal_numbers(leaf, other) for other in others) else path


def _are_equal_numbers(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.ndim == b.ndim == 0 and a.dtype == b.dtype and bool(a == b)
    return is_number(a) and is_number(b) and bool(a == b)


def is_rate(path: Path) -> bool:
    return path[0] == "group" and path[2:] == (RATE,)


def tensor_of(leaf: Any) -> Tensor:
    """Return a leaf of an optimizer as an input of a graph. Python numbers become float64."""
    return leaf.detach() if isinstance(leaf, Tensor) else torch.tensor(float(leaf), dtype=torch.float64)


def _differs(leaf: Any, other: Any) -> bool:
    is_plain = is_scalar(leaf) or isinstance(leaf, str | None)  # other objects are not compared
    return is_plain and (isinstance(other, Tensor) or type(leaf) is not type(other) or bool(leaf != other))


def _refusal(path: Path, problem: str) -> UnsupportedError:
    return UnsupportedError(f"the state `{'.'.join(map(str, path[2:] or path))}` cannot be carried over: {problem}")


_MOST_TRACED = 4
"""Number of parameters up to which each is traced."""


def trace_similar(optimizer: Optimizer, trained: Sequence[int]) -> Trace | None:
    """Return the trace of a step if parameters are independent and many are alike."""
    leaves = leaves_of(optimizer)
    classes: dict[object, list[int]] = {}
    for i in trained:
        classes.setdefault(_similarity_key(optimizer, leaves, i), []).append(i)
    examples = sorted(members[0] for members in classes.values())
    if len(examples) == 1:
        examples = list(trained[:2])  # two, which may be coupled
    if len(trained) <= max(_MOST_TRACED, len(examples)):
        return None
    partial_trace = trace(optimizer, examples, among=trained)
    example_of = {i: members[0] for members in classes.values() for i in members}
    return _widen(partial_trace, trained, {i: i if i in examples else example_of[i] for i in trained}, leaves)


def _similarity_key(optimizer: Optimizer, leaves: Leaves, index: int) -> object:
    """Return a key that is equal for similar parameters."""
    parameter = parameters_of(optimizer)[index]
    group = next(i for i, group in enumerate(optimizer.param_groups) if any(parameter is p for p in group["params"]))
    state = [
        (path[2:], (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf))
        for path, leaf in leaves.items()
        if path[:2] == ("state", index)
    ]
    return group, parameter.shape, parameter.dtype, tuple(state)


def _widen(partial_trace: Trace, trained: Sequence[int], example: Mapping[int, int], leaves: Leaves) -> Trace | None:
    """Copy the nodes of examples for all similar parameters, in place."""
    graph = partial_trace.model.graph
    inputs = dict(zip(partial_trace.places, graph.inputs, strict=True))
    outputs = dict(zip(partial_trace.results, graph.outputs, strict=True))
    nodes_of = {i: _own_nodes(i, partial_trace, inputs, outputs) for i in partial_trace.trained}
    if any(nodes is None for nodes in nodes_of.values()):
        return None
    names = partial_trace.model.names()
    for i in (i for i in trained if i not in partial_trace.trained):
        new: dict[ir.Value | None, ir.Value | None] = {None: None}
        for path, value in list(inputs.items()):
            if _owner(path) == example[i]:
                new_input = ir.Value(name=names.fresh("input"), type=value.type, shape=value.shape)
                inputs[_move_path(path, i)] = new[value] = new_input
        for node in nodes_of[example[i]] or ():
            copy = copy_node(node, [new.get(value, value) for value in node.inputs], names, "{}")
            graph.append(copy)
            new.update(zip(node.outputs, copy.outputs, strict=True))
        for path, value in list(outputs.items()):
            if _owner(path) == example[i]:
                outputs[_move_path(path, i)] = new.get(value) or value
    state: dict[Path, Tensor] = {}
    for i in trained:
        paths = [path for path in partial_trace.state if _owner(path) == example[i]]
        state |= {_move_path(path, i): tensor_of(leaves[_move_path(path, i)]) for path in paths}
    state |= {path: tensor for path, tensor in partial_trace.state.items() if _owner(path) is None}
    wide = Trace(partial_trace.model, list(trained), partial_trace.rates, state)
    graph.inputs[:] = [inputs[path] for path in wide.places]
    graph.outputs[:] = [outputs[path] for path in wide.results]
    return wide


def _owner(path: Path) -> int | None:
    """Return the parameter that a path belongs to."""
    is_own = path[0] in ("parameter", "gradient") or (path[0] == "state" and isinstance(path[1], int))
    return path[1] if is_own else None


def _move_path(path: Path, parameter: int) -> Path:
    return (path[0], parameter, *path[2:])


def _own_nodes(
    parameter: int, partial_trace: Trace, inputs: Mapping[Path, ir.Value], outputs: Mapping[Path, ir.Value]
) -> list[ir.Node] | None:
    """Return the nodes that depend on a parameter, or None if other parameters are coupled with it."""
    graph = partial_trace.model.graph
    touched = descendants(graph, [value for path, value in inputs.items() if _owner(path) == parameter])
    if any(value in touched for path, value in outputs.items() if _owner(path) != parameter):
        return None
    needed, _ = ancestors([value for path, value in outputs.items() if _owner(path) == parameter])
    nodes = [node for node in graph if node in needed and any(value in touched for value in node.outputs)]
    return None if any(True for node in nodes for _ in nested_graphs(node)) else nodes
