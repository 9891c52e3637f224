"""Schedulers of PyTorch in words of a recipe, without PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from onward.recipe.spec import Spec
from onward.vocabulary.rate_formulas import FOREVER, Pieces

Attributes = Mapping[str, Any]


class SchedulerRow(NamedTuple):
    """Scheduler of PyTorch and the schedule that it computes."""

    arguments: tuple[str, ...]
    """Arguments of the class, which are also its attributes."""
    read: Callable[[Attributes], Pieces]
    name: str
    write: Callable[[Mapping[str, Any]], tuple[Any, ...] | None]
    """Returns the arguments for the numbers of a schedule; None for other schedules."""


def _one(name: str, **options: Any) -> Pieces:
    return [(Spec(name, options), FOREVER)]


def _constant(s: Attributes) -> Pieces:
    """Return a fraction of the rate for some steps, and then the rate."""
    if s["factor"] == 1 or s["total_iters"] < 1:
        return _one("constant")
    level = Spec("linear", {"steps": 1, "start_factor": s["factor"], "end_factor": s["factor"]})
    return [(level, s["total_iters"]), (Spec("constant"), FOREVER)]


def _multistep(s: Attributes) -> Pieces:
    milestones = sorted(step for step, times in s["milestones"].items() for _ in range(times))
    return _one("multistep", milestones=milestones, gamma=s["gamma"]) if milestones else _one("constant")


def _line(n: Mapping[str, Any], start: float, end: float) -> tuple[Any, ...] | None:
    return (start, end, n["steps"]) if 0 < start <= 1 and 0 <= end <= 1 else None


SCHEDULERS = {
    "StepLR": SchedulerRow(
        ("step_size", "gamma"), lambda s: _one("step", size=s["step_size"], gamma=s["gamma"]),
        "step", lambda n: (n["size"], n["gamma"])),
    "MultiStepLR": SchedulerRow(
        ("milestones", "gamma"), _multistep, "multistep", lambda n: (n["milestones"], n["gamma"])),
    "ExponentialLR": SchedulerRow(
        ("gamma",), lambda s: _one("exponential", gamma=s["gamma"]), "exponential", lambda n: (n["gamma"],)),
    "LinearLR": SchedulerRow(
        ("start_factor", "end_factor", "total_iters"),
        lambda s: _one("linear", steps=s["total_iters"], start_factor=s["start_factor"], end_factor=s["end_factor"]),
        "linear", lambda n: _line(n, n["start_factor"], n["end_factor"])),
    "ConstantLR": SchedulerRow(("factor", "total_iters"), _constant, "constant", lambda n: (1.0, 1)),
    "PolynomialLR": SchedulerRow(
        ("total_iters", "power"), lambda s: _one("polynomial", steps=s["total_iters"], power=s["power"]),
        "polynomial", lambda n: None if n["end"] else (n["steps"], n["power"])),
    "CosineAnnealingLR": SchedulerRow(
        ("T_max", "eta_min"), lambda s: _one("cosine", steps=s["T_max"], min=s["eta_min"], after="torch"),
        "cosine", lambda n: None if n["after"] == "floor" else (n["steps"], n["min"])),
    "CosineAnnealingWarmRestarts": SchedulerRow(
        ("T_0", "T_mult", "eta_min"),
        lambda s: _one("cosine_restarts", period=s["T_0"], mult=s["T_mult"], min=s["eta_min"]),
        "cosine_restarts", lambda n: (n["period"], n["mult"], n["min"])),
}  # fmt: skip


def class_of(schedule: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the class of a schedule from `complete` and its arguments, or None."""
    if schedule.get("warmup") or schedule.get("every", 1) != 1:
        return None
    numbers = {**schedule, "milestones": [*schedule.get("milestones", ())]}
    counts = {key: numbers[key] for key in ("steps", "size", "period", "mult") if key in numbers}
    if not all(is_whole(count) for count in (*counts.values(), *numbers["milestones"])):
        return None
    numbers |= {key: int(count) for key, count in counts.items()}
    numbers["milestones"] = [*map(int, numbers["milestones"])]
    if schedule["name"] == "warmup":
        numbers |= {"name": "linear", "end_factor": 1.0}
    for class_name, row in SCHEDULERS.items():
        if row.name == numbers["name"] and (values := row.write(numbers)) is not None:
            return class_name, dict(zip(row.arguments, values, strict=True))
    return None


def one_cycle_arguments(numbers: Mapping[str, Any], position: int) -> dict[str, Any] | None:
    """Return the arguments of OneCycleLR for a schedule from `complete`, or None."""
    if position >= numbers["steps"] or not is_whole(numbers["steps"]):
        return None  # OneCycleLR raises after its last step
    if numbers.get("warmup") or numbers.get("every", 1) != 1:
        return None
    return {
        "total_steps": int(numbers["steps"]),
        "pct_start": numbers["pct_start"],
        "anneal_strategy": numbers["anneal"],
        "cycle_momentum": False,
        **{key: numbers[key] for key in ("div_factor", "final_div_factor", "three_phase")},
    }


def is_whole(number: float) -> bool:
    return math.isfinite(number) and number == int(number)


def one_cycle(s: Attributes, group: Attributes) -> Pieces:
    """Return the schedule of OneCycleLR, whose rates are in the groups of its optimizer."""
    options = {
        "steps": s["total_steps"],
        "pct_start": (s["_schedule_phases"][0]["end_step"] + 1) / s["total_steps"],
        "div_factor": group["max_lr"] / group["initial_lr"],
        "final_div_factor": group["initial_lr"] / group["min_lr"],
        "anneal": s["_anneal_func_type"],
        "three_phase": len(s["_schedule_phases"]) == 3,
    }
    return _one("one_cycle", **options)


def in_sequence(parts: Sequence[Pieces], milestones: Sequence[int]) -> Pieces:
    """Return the schedules of SequentialLR: each part starts at a milestone."""
    sequence: Pieces = []
    for pieces, start, end in zip(parts, [0, *milestones], [*milestones, FOREVER], strict=True):
        for spec, until in pieces:
            if start < end:
                sequence.append((spec, min(start + until, end)))
            if start + until >= end:
                break
    return sequence


def restart_position(period: int, mult: int, position: int) -> dict[str, int]:
    """Return the attributes of CosineAnnealingWarmRestarts after `position` steps."""
    while position >= period and mult > 1:
        position, period = position - period, period * mult
    return {"T_cur": position % period, "T_i": period}


REFUSED_SCHEDULERS = {
    "ReduceLROnPlateau": (
        "it depends on a metric that a training model does not compute",
        "leave `scheduler` out, and set the rate in the file: `training.set('group0/lr', 1e-4)`",
    ),
}
"""Class of torch.optim.lr_scheduler -> problem and hint."""


_COMMON = frozenset({
    "base_lrs", "last_epoch", "verbose", "_step_count", "_is_initial", "_get_lr_called_within_step", "_last_lr",
})  # fmt: skip
"""Attributes of all schedulers."""
_ONE_CYCLE = {"total_steps", "_schedule_phases", "_anneal_func_type", "cycle_momentum"}
_NEMO = {"max_steps", "warmup_steps", "constant_steps", "decay_steps", "min_lr"}


def read_saved(state: Attributes, group: Attributes) -> Pieces | None:
    """Return the schedules of a saved state, whose attributes tell its class, or None.

    Args:
        state: the state of the scheduler
        group: settings of a group of its optimizer, which has the rates of one cycle
    """
    own = state.keys() - _COMMON
    if own == {"_milestones", "_schedulers"}:
        milestones, inner = state["_milestones"], state["_schedulers"]
        if not isinstance(milestones, list) or not isinstance(inner, list) or len(inner) != len(milestones) + 1:
            return None
        parts = [read_saved(item, {}) if isinstance(item, Mapping) else None for item in inner]
        known_parts = [pieces for pieces in parts if pieces is not None]
        return in_sequence(known_parts, milestones) if len(known_parts) == len(parts) else None
    if own == _ONE_CYCLE:
        numbers = [state["total_steps"], *(group.get(key) for key in ("max_lr", "initial_lr", "min_lr"))]
        is_known = all(isinstance(number, int | float) and number > 0 for number in numbers)
        return one_cycle(state, group) if is_known and not state["cycle_momentum"] else None
    if own == _NEMO:
        return _nemo_cosine(state)
    row = next((row for row in SCHEDULERS.values() if own - {"T_i", "T_cur"} == {*row.arguments}), None)
    return row.read(state) if row is not None else None


def _nemo_cosine(s: Attributes) -> Pieces | None:
    """Return the schedules of NeMo's CosineAnnealing, whose warm-up starts above 0."""
    warmup, steps = s["warmup_steps"], s["max_steps"]
    if s["constant_steps"] or not (isinstance(warmup, int) and isinstance(steps, int) and 0 <= warmup < steps):
        return None
    rise = Spec("linear", {"steps": warmup, "start_factor": 1 / (warmup + 1), "end_factor": 1.0})
    fall = Spec("cosine", {"steps": steps - warmup, "min": s["min_lr"]})
    return [*([(rise, warmup)] if warmup else []), (fall, FOREVER)]
