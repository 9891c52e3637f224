"""Transformations and schedules of optax in words of a recipe, without importing optax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from onward.errors import UnsupportedError
from onward.recipe.spec import Spec
from onward.vocabulary.optimizers import OPTAX_ROWS
from onward.vocabulary.rows import OptaxCall, OptaxRow

SETTINGS = {"learning_rate": "lr", "b1": "beta1", "b2": "beta2", "decay": "alpha", "weight_decay_rate": "weight_decay"}
"""Arguments of optax's optimizers -> names in a recipe."""

# ---- optimizers ------------------------------------------------------------------------------------------------------


def row_of(transformation: str, arguments: Mapping[str, Any]) -> OptaxRow:
    """Return the first row with a transformation of these arguments. Flags may be numbers."""
    return next(
        row
        for row in OPTAX_ROWS
        for stage in row.stages
        if stage.name == transformation
        and all(bool(arguments.get(name)) == value for name, value in {"nesterov": False, **stage.fixed}.items())
    )


def reduced_axis(slot: str, shape: tuple[int, ...]) -> int:
    """Return the axis that a slot of Adafactor lacks; one past the last axis for `variance`."""
    if slot == "variance":
        return len(shape)
    return int(np.argsort(shape)[-1 if slot == "row_var" else -2])


# ---- schedules -------------------------------------------------------------------------------------------------------
#
# A recipe has one base rate, and schedules relative to it that follow one another. Lines can start
# and end anywhere;
# curves begin at the base rate. So a schedule of optax is first taken apart into lines and curves
# with their rates, and
# can be said in a recipe if all its curves begin at the same rate.


class RateLine(NamedTuple):
    """A schedule from one rate to another."""

    start: float
    end: float
    steps: float = 1


class RateCurve(NamedTuple):
    """A schedule that begins at `base`."""

    base: float
    spec: Spec


Pieces = list[tuple[RateLine | RateCurve, float]]
"""Schedules in sequence with the update before which each ends; the last has no end."""

Free = Mapping[str, Any]
"""Arguments of the maker of a schedule, in the closure of its function."""


def words_of_pieces(pieces: Pieces) -> tuple[float, list[Spec]]:
    """Return the base rate and the schedules of a recipe."""
    bases = list(dict.fromkeys(piece.base for piece, _ in pieces if isinstance(piece, RateCurve)))
    if len(bases) > 1:
        listed = ", ".join(f"{abs(base):g}" for base in bases)
        raise UnsupportedError(
            f"the schedule has curves that begin at different rates ({listed}), and in a recipe they share one",
            hint="give them the same initial value",
        )
    rates = [rate for piece, _ in pieces if isinstance(piece, RateLine) for rate in (piece.start, piece.end)]
    base = bases[0] if bases else max(rates, key=abs)
    if len(pieces) == 1 and isinstance(piece := pieces[0][0], RateLine) and piece.start == piece.end:
        return base, []
    specs = []
    for piece, end in pieces:
        until = {"until": end} if math.isfinite(end) else {}
        if isinstance(piece, RateCurve):
            specs.append(Spec(piece.spec.name, {**piece.spec.options, **until}))
        elif not base or piece.start == piece.end == base:
            specs.append(Spec("constant", until))
        else:
            factors = {"start_factor": piece.start / base, "end_factor": piece.end / base}
            specs.append(Spec("linear", {"steps": piece.steps, **factors, **until}))
    return base, specs


def scale_rates(spec: Spec, factor: float) -> Spec:
    """Return a schedule for another base rate: two of its numbers are rates themselves."""
    options = {key: value * factor if key in ("min", "end") else value for key, value in spec.options.items()}
    return Spec(spec.name, options)


def clip_pieces(pieces: Pieces, length: float) -> Pieces:
    """Return the pieces within `length` updates."""
    clipped: Pieces = []
    start = 0.0
    for piece, end in pieces:
        if start < min(end, length):
            clipped.append((piece, min(end, length)))
            start = min(end, length)
    return clipped


def _constant(free: Free) -> Pieces:
    value = float(free.get("value", free.get("init_value", 0.0)))
    return [(RateLine(value, value), math.inf)]


def _polynomial(free: Free) -> Pieces:
    if "transition_steps" not in free:
        return _constant(free)
    start, end, steps, power = (float(free[n]) for n in ("init_value", "end_value", "transition_steps", "power"))
    curve = RateCurve(start, Spec("polynomial", {"steps": steps, "power": power, "end": end}))
    return _after(free, start, [(RateLine(start, end, steps) if power == 1 else curve, math.inf)])


def _exponential(free: Free) -> Pieces:
    if "transition_steps" not in free:
        return _constant(free)
    start, rate, steps = (float(free[name]) for name in ("init_value", "decay_rate", "transition_steps"))
    if free["staircase"]:
        curve = RateCurve(start, Spec("step", {"size": steps, "gamma": rate}))
    else:
        curve = RateCurve(start, Spec("exponential", {"gamma": rate ** (1 / steps)}))
    pieces: Pieces = [(curve, math.inf)]
    if free.get("end_value") is not None:
        pieces = _limit_curve(curve, float(free["end_value"]), rate, steps, bool(free["staircase"]))
    return _after(free, start, pieces)


def _limit_curve(curve: RateCurve, limit: float, rate: float, steps: float, staircase: bool) -> Pieces:
    """Return an exponential curve until it is at a limit, and that limit from then on."""

    def passed(n: int) -> bool:
        size = abs(curve.base) * rate ** (n // steps if staircase else n / steps)
        return size <= abs(limit) if rate < 1 else size >= abs(limit)

    last = RateLine(limit, limit)
    if passed(0):
        return [(last, math.inf)]
    if rate == 1 or not limit:
        return [(curve, math.inf)]
    end = max(math.floor(steps * math.log(limit / curve.base) / math.log(rate)) - 1, 1)
    while not passed(end):
        end += 1
    return [(curve, end), (last, math.inf)]


def _after(free: Free, value: float, pieces: Pieces) -> Pieces:
    """Return pieces after a time at a constant rate."""
    begin = float(free["transition_begin"])
    return [(RateLine(value, value), begin), *((piece, begin + end) for piece, end in pieces)] if begin else pieces


def _cosine(free: Free) -> Pieces:
    if float(free["exponent"]) != 1:
        raise UnsupportedError("cosine_decay_schedule with an exponent has no counterpart in a recipe")
    start = float(free["init_value"])
    numbers = {"steps": float(free["decay_steps"]), "min": start * float(free["alpha"])}
    return [(RateCurve(start, Spec("cosine", numbers)), math.inf)]


def _piecewise_constant(free: Free) -> Pieces:
    value = float(free["init_value"])
    changes = sorted((free["boundaries_and_scales"] or {}).items())
    scales = {float(scale) for _, scale in changes}
    if len(scales) == 1 and changes[0][0] >= 0:
        numbers = {"milestones": [float(boundary) for boundary, _ in changes], "gamma": scales.pop()}
        return [(RateCurve(value, Spec("multistep", numbers)), math.inf)]
    pieces: Pieces = []
    for boundary, scale in changes:
        pieces.append((RateLine(value, value), float(boundary)))
        value *= float(scale)
    return clip_pieces([*pieces, (RateLine(value, value), math.inf)], math.inf)


def _piecewise_interpolated(free: Free) -> Pieces:
    bounds, values = [0.0, *map(float, free["boundaries"])], [float(free["init_value"])]
    for scale in free["scales"]:
        values.append(values[-1] * float(scale))
    if free["interpolate_fn"].__name__ == "_linear_interpolate":
        spans = zip(pairwise(values), pairwise(bounds), strict=True)
        lines: Pieces = [(RateLine(*rates, end - start), end) for rates, (start, end) in spans]
        return clip_pieces([*lines, (RateLine(values[-1], values[-1]), math.inf)], math.inf)
    if len(bounds) == 2:
        return [(RateCurve(values[0], Spec("cosine", {"steps": bounds[1], "min": values[1]})), math.inf)]
    if len(bounds) == 3 and 0 < bounds[1] < bounds[2]:
        start, peak, end = values
        numbers = {
            "steps": bounds[2] + 1,
            "pct_start": (bounds[1] + 1) / (bounds[2] + 1),
            "div_factor": peak / start,
            "final_div_factor": start / end,
        }
        return [(RateCurve(peak, Spec("one_cycle", numbers)), math.inf)]
    raise UnsupportedError("a recipe has no chain of more than two cosine curves up and down")


SCHEDULES: dict[str, Callable[[Free], Pieces]] = {
    "constant_schedule": _constant,
    "polynomial_schedule": _polynomial,
    "exponential_decay": _exponential,
    "cosine_decay_schedule": _cosine,
    "piecewise_constant_schedule": _piecewise_constant,
    "piecewise_interpolate_schedule": _piecewise_interpolated,
}
"""Schedules of optax, but for `join_schedules` -> what they are in a recipe."""


Numbers = Mapping[str, Any]


def _multistep_call(lr: float, n: Numbers) -> OptaxCall | None:
    milestones = list(n["milestones"]) if isinstance(n["milestones"], Sequence) else [n["milestones"]]
    if len(set(milestones)) < len(milestones):
        return None
    scales = dict.fromkeys(milestones, n["gamma"])
    return "piecewise_constant_schedule", {"init_value": lr, "boundaries_and_scales": scales}


def _exponential_call(lr: float, steps: float, factor: float, **more: bool) -> OptaxCall:
    return "exponential_decay", {"init_value": lr, "transition_steps": steps, "decay_rate": factor, **more}


def _polynomial_call(lr: float, n: Numbers) -> OptaxCall:
    arguments = {"init_value": lr, "end_value": n["end"], "power": n["power"], "transition_steps": n["steps"]}
    return "polynomial_schedule", arguments


def _cosine_call(lr: float, n: Numbers) -> OptaxCall | None:
    if n["after"] != "floor" or not lr:
        return None
    return "cosine_decay_schedule", {"init_value": lr, "decay_steps": n["steps"], "alpha": n["min"] / lr}


def _one_cycle_call(lr: float, n: Numbers) -> OptaxCall | None:
    """Return the schedule of optax, whose peaks are at whole updates, or None."""
    peak, last, rise = n["pct_start"] * n["steps"] - 1, n["steps"] - 1, n["div_factor"]
    if n["three_phase"] or abs(peak - round(peak)) > 1e-9 or not 0 < round(peak) < last or last != int(last):
        return None
    scales = {round(peak): rise, int(last): 1 / (rise * n["final_div_factor"])}
    interpolation = "cosine" if n["anneal"] == "cos" else "linear"
    arguments = {"interpolate_type": interpolation, "init_value": lr / rise, "boundaries_and_scales": scales}
    return "piecewise_interpolate_schedule", arguments


def line_call(start: float, end: float, steps: float) -> OptaxCall:
    """Return the schedule of optax from one rate to another."""
    return "linear_schedule", {"init_value": start, "end_value": end, "transition_steps": steps}


SCHEDULE_CALLS: dict[str, Callable[[float, Numbers], OptaxCall | None]] = {
    "constant": lambda lr, n: ("constant_schedule", {"value": lr}),
    "step": lambda lr, n: _exponential_call(lr, n["size"], n["gamma"], staircase=True),
    "multistep": _multistep_call,
    "exponential": lambda lr, n: _exponential_call(lr, 1, n["gamma"]) if n["gamma"] else None,
    "linear": lambda lr, n: line_call(lr * n["start_factor"], lr * n["end_factor"], n["steps"]),
    "polynomial": _polynomial_call,
    "cosine": _cosine_call,
    "one_cycle": _one_cycle_call,
    "warmup": lambda lr, n: line_call(lr * n["start_factor"], lr, n["steps"]),
}
"""Schedules of a recipe -> the schedule of optax for a base rate and all options, or None."""
