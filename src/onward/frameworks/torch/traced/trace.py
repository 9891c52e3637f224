"""One step of an optimizer as a graph: from parameters, gradients and state to new ones.

A trace takes most of a second for each parameter. Of many that are alike one is traced, and others are written after
it; whether they are treated alike, a trial shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from torch.optim import Optimizer

from onward.build import twin
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

_MOST_WAYS = 16
_SLOWER = {"foreach": False, "fused": False}
"""What is told to optimizers that have several ways to compute the same."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """A graph, and what its inputs and outputs are."""

    model: Model
    """Inputs are parameters, gradients, learning rates and state; outputs are the new parameters and state."""
    trained: list[int]
    """The parameters, by their places among all of the optimizer."""
    rates: list[Path]
    state: dict[Path, Tensor]
    """Where state is, and its values. `("each", "step")` is a number that all parameters have in common."""

    @property
    def places(self) -> list[Path]:
        """What each input is."""
        own = [(kind, i) for kind in ("parameter", "gradient") for i in self.trained]
        return [*own, *self.rates, *self.state]

    @property
    def results(self) -> list[Path]:
        """What each output is."""
        return [*(("parameter", i) for i in self.trained), *self.state]


def trace(optimizer: Optimizer, trained: Sequence[int], among: Sequence[int] | None = None) -> Trace:
    """The graph of a step; the optimizer must hold all state that it ever does. It stays as it is.

    `trained` are the parameters that have gradients, by their places `among` others.
    """
    varying: set[Path] = set()
    shared = True
    while True:
        step = _Step(optimizer, trained, varying, among or trained if shared else ())
        try:
            model = export_function(step, tuple(step.examples), f"a step of {type(optimizer).__name__}")
            return Trace(model, list(trained), list(step.rates), step.state)
        except _Varies as found:
            varying |= found.paths
        except _NotShared:
            shared = False


class _Varies(BaseException):
    """Numbers turn out to change with each step. (No Exception, which the exporter would explain.)"""

    def __init__(self, paths: set[Path]):
        self.paths = paths


class _NotShared(BaseException):
    """Numbers of parameters that were equal do not stay so."""


class _Step:
    """A step as a function from tensors to tensors."""

    def __init__(self, optimizer: Optimizer, trained: Sequence[int], varying: set[Path], sharing: Sequence[int]):
        self._optimizer = optimizer
        self._trained = trained
        self._ways = 0
        self._leaves = leaves_of(optimizer)
        self._inputs = {
            path: common(path, self._leaves, sharing) for path in self._leaves if self._is_input(path, varying)
        }
        places = {place: tensor_of(self._leaves[path]) for path, place in self._inputs.items()}
        self.rates = {place: tensor for place, tensor in places.items() if is_rate(place)}
        self.state = {place: tensor for place, tensor in places.items() if not is_rate(place)}
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
        self._ways = 0  # of the trace that begins
        return self._explored(tensors, {})

    def _explored(self, tensors: Sequence[Tensor], answers: dict[object, bool]) -> list[Tensor]:
        """The results whatever the answers are to questions that are not answered yet."""
        self._ways += 1
        if self._ways > _MOST_WAYS:
            raise UnsupportedError(
                f"a step decides by the values of tensors what to do, in more than {_MOST_WAYS} ways",
                hint="choose by `torch.where`",
            )
        results, asked = self._taken(tensors, answers)
        asked = [question for question in asked if question.key not in answers]
        for i, question in reversed(list(enumerate(asked))):
            before = {other.key: True for other in asked[:i]}
            others = self._explored(tensors, {**answers, **before, question.key: False})
            condition = question.condition.reshape(()).to(torch.bool)
            results = [torch.where(condition, yes, no) for yes, no in zip(results, others, strict=True)]
        return results

    def _taken(self, tensors: Sequence[Tensor], answers: dict[object, bool]) -> tuple[list[Tensor], list[Any]]:
        """One way through a step."""
        count = len(self._trained)
        own = dict(zip(self._trained, (x.clone() for x in tensors[:count]), strict=True))
        gradients = list(zip(own.values(), (x.clone() for x in tensors[count : 2 * count]), strict=True))
        given = dict(zip((*self.rates, *self.state), tensors[2 * count :], strict=True))
        made = {path: given[place].clone() for path, place in self._inputs.items()}
        numbers = [(place, made[path]) for path, place in self._inputs.items() if made[path].ndim == 0]
        optimizer = self._optimizer

        def new(path: Path, leaf: Any) -> Any:
            return made.get(path, _SLOWER.get(path[-1], leaf) if path[0] == "group" else leaf)

        shell = shell_of(optimizer, own, new)
        with shadow_builtins(type(optimizer)), Numbers(numbers, gradients, answers) as mode:
            step_of(shell)()
        return [*own.values(), *self._new_state(leaves_of(shell), mode)], mode.asked

    def _new_state(self, after: Leaves, mode: Numbers) -> list[Tensor]:
        constant = {path: leaf for path, leaf in self._leaves.items() if path not in self._inputs}
        varying = {
            path for path, leaf in constant.items() if path[-1] not in _SLOWER and _differs(leaf, after.get(path))
        }
        for path in varying:
            if not is_scalar(constant[path]):
                raise _refusal(path, "a step changes it, and it is neither a tensor nor a number")
        if varying:
            raise _Varies(varying)
        if any(mode.key(after[path]) != path for path in self.rates):
            raise UnsupportedError("a step changes its own learning rate", hint="let a scheduler do that")
        new: dict[Path, Tensor] = {}
        for path, place in self._inputs.items():
            if is_rate(path):
                continue
            if path not in after or not (isinstance(after[path], Tensor) or is_scalar(after[path])):
                raise _refusal(path, "a step leaves no tensor there")
            result, example = tensor_of(after[path]), self.state[place]
            if result.shape != example.shape:
                raise _refusal(path, "a step changes its shape")
            if place in new and mode.key(after[path]) != mode.key(new[place]):
                raise _NotShared
            new.setdefault(place, after[path] if isinstance(after[path], Tensor) else result)
        return [new[place].to(example.dtype).clone() for place, example in self.state.items()]


def common(path: Path, leaves: Leaves, sharing: Sequence[int]) -> Path:
    """Where a number is that these parameters have in common; else where it is."""
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
    """What an optimizer holds as an input of a graph; numbers of Python are in double precision."""
    return leaf.detach() if isinstance(leaf, Tensor) else torch.tensor(float(leaf), dtype=torch.float64)


def _differs(leaf: Any, other: Any) -> bool:
    is_plain = is_scalar(leaf) or isinstance(leaf, str | None)  # other objects are compared by nobody
    return is_plain and (isinstance(other, Tensor) or type(leaf) is not type(other) or bool(leaf != other))


def _refusal(path: Path, problem: str) -> UnsupportedError:
    return UnsupportedError(f"the state `{'.'.join(map(str, path[2:] or path))}` cannot be carried over: {problem}")


_FEW = 4
"""So many parameters are traced one by one."""


def traced_alike(optimizer: Optimizer, trained: Sequence[int]) -> Trace | None:
    """The trace of a step, if parameters do not depend on one another and many are alike."""
    leaves = leaves_of(optimizer)
    classes: dict[object, list[int]] = {}
    for i in trained:
        classes.setdefault(_kind(optimizer, leaves, i), []).append(i)
    first = sorted(members[0] for members in classes.values())
    if len(first) == 1:
        first = list(trained[:2])  # two, which might depend on one another
    if len(trained) <= max(_FEW, len(first)):
        return None
    few = trace(optimizer, first, among=trained)
    of = {i: members[0] for members in classes.values() for i in members}
    return _widen(few, trained, {i: i if i in first else of[i] for i in trained}, leaves)


def _kind(optimizer: Optimizer, leaves: Leaves, place: int) -> object:
    """What is equal for parameters that are alike."""
    parameter = parameters_of(optimizer)[place]
    group = next(i for i, group in enumerate(optimizer.param_groups) if any(parameter is p for p in group["params"]))
    state = [
        (path[2:], (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf))
        for path, leaf in leaves.items()
        if path[:2] == ("state", place)
    ]
    return group, parameter.shape, parameter.dtype, tuple(state)


def _widen(few: Trace, trained: Sequence[int], example: Mapping[int, int], leaves: Leaves) -> Trace | None:
    """The trace with what it has for an example written for all parameters that are like it; in place."""
    graph = few.model.graph
    inputs = dict(zip(few.places, graph.inputs, strict=True))
    outputs = dict(zip(few.results, graph.outputs, strict=True))
    own = {i: _own_nodes(i, few, inputs, outputs) for i in few.trained}
    if any(nodes is None for nodes in own.values()):
        return None
    names = few.model.names()
    for i in (i for i in trained if i not in few.trained):
        new: dict[ir.Value | None, ir.Value | None] = {None: None}
        for place, value in list(inputs.items()):
            if _owner(place) == example[i]:
                made = ir.Value(name=names.fresh("input"), type=value.type, shape=value.shape)
                inputs[_move_path(place, i)] = new[value] = made
        for node in own[example[i]] or ():
            copy = twin(node, [new.get(value, value) for value in node.inputs], names, "{}")
            graph.append(copy)
            new.update(zip(node.outputs, copy.outputs, strict=True))
        for place, value in list(outputs.items()):
            if _owner(place) == example[i]:
                outputs[_move_path(place, i)] = new.get(value) or value
    state: dict[Path, Tensor] = {}
    for i in trained:
        places = [place for place in few.state if _owner(place) == example[i]]
        state |= {_move_path(place, i): tensor_of(leaves[_move_path(place, i)]) for place in places}
    state |= {place: tensor for place, tensor in few.state.items() if _owner(place) is None}
    wide = Trace(few.model, list(trained), few.rates, state)
    graph.inputs[:] = [inputs[place] for place in wide.places]
    graph.outputs[:] = [outputs[place] for place in wide.results]
    return wide


def _owner(place: Path) -> int | None:
    """The parameter that something belongs to."""
    is_own = place[0] in ("parameter", "gradient") or (place[0] == "state" and isinstance(place[1], int))
    return place[1] if is_own else None


def _move_path(place: Path, parameter: int) -> Path:
    return (place[0], parameter, *place[2:])


def _own_nodes(
    parameter: int, few: Trace, inputs: Mapping[Path, ir.Value], outputs: Mapping[Path, ir.Value]
) -> list[ir.Node] | None:
    """The nodes that depend on a parameter, in order; None if something else depends on them, or they on others."""
    graph = few.model.graph
    touched = descendants(graph, [value for place, value in inputs.items() if _owner(place) == parameter])
    if any(value in touched for place, value in outputs.items() if _owner(place) != parameter):
        return None
    wanted, _ = ancestors([value for place, value in outputs.items() if _owner(place) == parameter])
    nodes = [node for node in graph if node in wanted and any(value in touched for value in node.outputs)]
    return None if any(True for node in nodes for _ in nested_graphs(node)) else nodes
