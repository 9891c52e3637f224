"""An optimizer of PyTorch and what was traced of it, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from onward.agreement.steps import Trial, compare_updates, update_by
from onward.agreement.tolerance import Arrays
from onward.engines.torch.types import from_array, to_array
from onward.frameworks.torch.traced.initial_state import step_of
from onward.frameworks.torch.traced.optimizer_state import Path, copy_optimizer, leaves_of, parameters_of
from onward.recipe.optimizers import FunctionOptimizer
from onward.recipe.optimizers.graph_optimizer import RATE


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
        return {**parameters(), **_state(theirs, side, trained)}

    start = {**parameters(), **function.initial}
    compare_updates(update_by(function), step, start, held, optimizer=f"the optimizer {function.name}")


def _state(optimizer: Optimizer, side: Side, trained: Mapping[int, str]) -> dict[str, np.ndarray]:
    leaves, first = leaves_of(optimizer), next(iter(trained))
    found = {}
    for name, place in side.places.items():
        leaf = leaves[("state", first, *place[1:]) if place[0] == "each" else place]
        found[name] = to_array(leaf).copy() if isinstance(leaf, Tensor) else np.asarray(leaf, np.float64)
    return found
