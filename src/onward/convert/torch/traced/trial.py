"""An optimizer of PyTorch and what was traced of it, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from onward.convert.torch.traced.initial_state import step_of
from onward.convert.torch.traced.optimizer_state import Path, copy_optimizer, leaves_of, parameters_of
from onward.convert.trial import TRIALS, compare
from onward.engines.torch.types import to_array
from onward.gradcheck.evaluate import Session
from onward.recipe.optimizers import FunctionOptimizer
from onward.recipe.optimizers.graph_optimizer import COUNT, RATE, gradient_of
from onward.transform.inline import inline


class Side(NamedTuple):
    """A function, and where the optimizer holds what it takes as state."""

    function: FunctionOptimizer
    places: Mapping[str, Path]
    group: int
    """The group whose learning rate it takes."""


def try_out(optimizer: Optimizer, trained: Mapping[int, str], sides: Sequence[Side]) -> None:
    """Compare some steps, each from the same state. Neither side is changed."""
    theirs = copy_optimizer(optimizer)
    held = {name: parameters_of(theirs)[i] for i, name in trained.items()}
    rates = [float(group[RATE]) for group in theirs.param_groups]
    sessions = [Session(inline(side.function.update)) for side in sides]
    states = [
        {value.name or "": side.function.initial[value.name or ""] for value in side.function.state} for side in sides
    ]
    generator = torch.Generator().manual_seed(0)
    for count, (factor, size) in enumerate(TRIALS, 1):
        before = {name: to_array(parameter).copy() for name, parameter in held.items()}
        given = {}
        for name, parameter in held.items():
            parameter.grad = size * torch.randn(parameter.shape, generator=generator).to(parameter)
            given[gradient_of(name)] = to_array(parameter.grad).copy()
        for group, rate in zip(theirs.param_groups, rates, strict=True):
            group[RATE] = rate * factor
        with torch.random.fork_rng():
            step_of(theirs)()
        after = {name: to_array(parameter).copy() for name, parameter in held.items()}
        for i, side in enumerate(sides):
            scalars = {RATE: np.asarray(rates[side.group] * factor), COUNT: np.asarray(count)}
            found = sessions[i]({**before, **given, **states[i], **scalars})
            expected = after | _state(theirs, side, trained)
            names = [*side.function.parameters, *states[i]]
            for name, array in zip(names, found, strict=True):
                compare(name, array, expected[name], {**before, **states[i]}[name], side.function.name)
            states[i] = {name: expected[name] for name in states[i]}


def _state(optimizer: Optimizer, side: Side, trained: Mapping[int, str]) -> dict[str, np.ndarray]:
    leaves, first = leaves_of(optimizer), next(iter(trained))
    found = {}
    for name, place in side.places.items():
        leaf = leaves[("state", first, *place[1:]) if place[0] == "each" else place]
        found[name] = to_array(leaf).copy() if isinstance(leaf, Tensor) else np.asarray(leaf, np.float64)
    return found
