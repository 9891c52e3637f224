"""The rates of our schedules, as a graph computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from built_graphs import Graph

from onward.build import Builder, Expr
from onward.recipe.schedules import SchedulePart, schedule, sequence

LR, STEPS = 0.1, 150


def part(op: Builder, name: str, options: dict[str, Any], until: float | None = None) -> SchedulePart:
    numbers, choices = schedule(name).resolve(options)
    exprs = {key: op.constant(np.asarray(number, np.float64)) for key, number in numbers.items()}
    return SchedulePart(schedule(name), exprs, choices, None if until is None else op.constant(np.float64(until)))


def rates(*parts: tuple[Any, ...], steps: int = STEPS) -> np.ndarray:
    """The rates of the first updates under schedules, each as (name, options[, until])."""

    def body(op: Builder, step: Expr) -> Expr:
        lr = op.constant(np.float64(LR))
        return sequence(op, lr, step, [part(op, *description) for description in parts])

    graph = Graph(body, np.int64(0))
    return np.array([graph(np.int64(step)) for step in range(steps)])


REQUIRED = {
    "factors": [1.0, 0.5, 0.75, 0.1],
    "steps": 40,
    "size": 5,
    "period": 9,
    "gamma": 0.9,
    "milestones": [3, 9],
    "timescale": 10,
}


def options_of(name: str) -> dict[str, Any]:
    return {key: REQUIRED[key] for key, default in schedule(name).options.items() if default is None}
