"""One step of an optimizer as a graph: from parameters, gradients and state to new ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onward.errors import UnsupportedError
from onward.frameworks.torch.exporter import export_function
from onward.frameworks.torch.traced.builtins import shadow_builtins
from onward.frameworks.torch.traced.initial_state import step_of
from onward.frameworks.torch.traced.optimizer_state import (
    Leaves,
    Path,
    is_number,
    is_scalar,
    leaves_of,
    parameters_of,
    shell_of,
)
from onward.frameworks.torch.traced.symbolic_numbers import Numbers
from onward.model import Model
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
