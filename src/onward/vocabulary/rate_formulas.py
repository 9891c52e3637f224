"""Learning rates as formulas, for LambdaLR where PyTorch has no such scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from onward.recipe.schedules import schedule as schedule_of_recipe
from onward.recipe.spec import Spec

Pieces = list[tuple[Spec, float]]
"""Schedules that follow one another, and the steps before which they end; the last has no end."""

FOREVER = math.inf


class Factor:
    """Factor of the base rate at each step, by schedules in sequence.

    A schedule is a dict: its `name`, its numbers and choices, and `until`, the step at which the
    next one begins.
    """

    def __init__(self, base: float, schedules: list[dict[str, Any]]) -> None:
        self.base = base
        self.schedules = schedules

    def __call__(self, step: int) -> float:
        return self.rate(step) / self.base if self.base else 0.0

    def rate(self, step: float) -> float:
        start = 0.0
        for schedule in self.schedules:
            until = schedule.get("until", math.inf)
            if step < until:
                break
            start = until
        return rate_of(schedule, self.base, step - start)


def rate_of(schedule: dict[str, Any], lr: float, step: float) -> float:
    """The rate of one schedule, after a warm-up if it has one."""
    numbers = {key: value for key, value in schedule.items() if key not in ("name", "until", "every", "warmup_start")}
    step = step // schedule.get("every", 1)
    warmup = numbers.pop("warmup", 0)
    if step < warmup:
        return warming_up(lr, step, warmup, schedule["warmup_start"])
    if "steps" in numbers:
        numbers["steps"] -= warmup
    return RATES[schedule["name"]](lr, step - warmup, **numbers)


def cosine_between(start: float, end: float, p: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * p)) / 2


def line_between(start: float, end: float, p: float) -> float:
    return start + (end - start) * p


def warming_up(lr: float, step: float, steps: float, start_factor: float) -> float:
    return lr * line_between(start_factor, 1, min(step / steps, 1))


def constant(lr: float, step: float) -> float:
    return lr


def in_steps(lr: float, step: float, size: float, gamma: float) -> float:
    return float(lr * gamma ** (step // size))


def multistep(lr: float, step: float, milestones: list[float], gamma: float) -> float:
    return lr * gamma ** sum(milestone <= step for milestone in milestones)


def exponential(lr: float, step: float, gamma: float) -> float:
    return float(lr * gamma**step)


def linear(lr: float, step: float, steps: float, start_factor: float, end_factor: float) -> float:
    return lr * line_between(start_factor, end_factor, min(step / steps, 1))


def polynomial(lr: float, step: float, steps: float, power: float, end: float) -> float:
    return end + (lr - end) * (1 - min(step / steps, 1)) ** power


def cosine(lr: float, step: float, steps: float, min: float, after: str) -> float:
    p = step / steps
    return cosine_between(lr, min, 1.0 if after == "floor" and p > 1 else p)


def cosine_restarts(lr: float, step: float, period: float, mult: float, min: float) -> float:
    t = step / period
    if mult == 1:
        return cosine_between(lr, min, t - math.floor(t))
    length = mult ** math.floor(math.log(t * (mult - 1) + 1) / math.log(mult) + 1e-9)
    return cosine_between(lr, min, (t - (length - 1) / (mult - 1)) / length)


def one_cycle(
    lr: float,
    step: float,
    steps: float,
    pct_start: float,
    div_factor: float,
    final_div_factor: float,
    anneal: str,
    three_phase: bool,
) -> float:
    low, peak = lr / div_factor, pct_start * steps - 1
    back = [(2 * peak, low)] if three_phase else []
    knots = [(0.0, low), (peak, lr), *back, (steps - 1, low / final_div_factor)]
    between = cosine_between if anneal == "cos" else line_between
    for (start, start_rate), (end, end_rate) in pairwise(knots):
        if step <= end:
            return between(start_rate, end_rate, (step - start) / max(end - start, 1e-300))
    return low / final_div_factor


def inverse_sqrt(lr: float, step: float, timescale: float) -> float:
    return lr / math.sqrt(1 + step / timescale)


def table(lr: float, step: float, factors: list[float], after: str) -> float:
    return lr * factors[int(step) % len(factors) if after == "repeat" else min(int(step), len(factors) - 1)]


RATES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "step": in_steps,
    "multistep": multistep,
    "exponential": exponential,
    "linear": linear,
    "polynomial": polynomial,
    "cosine": cosine,
    "cosine_restarts": cosine_restarts,
    "one_cycle": one_cycle,
    "inverse_sqrt": inverse_sqrt,
    "table": table,
    "warmup": warming_up,
}


def complete(pieces: Sequence[tuple[Spec, float]]) -> list[dict[str, Any]]:
    """Return schedules with all their numbers and choices, as `Factor` takes them."""
    completed: list[dict[str, Any]] = []
    for spec, until in pieces:
        numbers, choices = schedule_of_recipe(spec.name).resolve(spec.options)
        end = {"until": until} if until < FOREVER else {}
        completed.append({"name": spec.name, **numbers, **choices, **end})
    return completed


def in_words(pieces: Pieces, every: int = 1) -> list[Spec]:
    """Return schedules of a recipe by updates, `every` per step; empty for a constant rate."""
    unit = {} if every == 1 else {"every": every}
    ends = [{} if until == FOREVER else {"until": until * every} for _, until in pieces]
    if [spec for spec, _ in pieces] == [Spec("constant")]:
        return []
    return [Spec(spec.name, {**spec.options, **unit, **end}) for (spec, _), end in zip(pieces, ends, strict=True)]
