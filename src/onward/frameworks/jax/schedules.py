"""Schedules of optax as those of a recipe, and back.

A recipe has one base rate, and schedules relative to it that follow one another. Lines can start and end anywhere;
curves begin at the base rate. So a schedule of optax is first taken apart into lines and curves with their rates, and
can be said in a recipe if all its curves begin at the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from onward.errors import UnsupportedError
from onward.frameworks.jax.closures import free_variables, origin
from onward.frameworks.jax.objects import OBJECTS
from onward.recipe.spec import Spec

Schedule = Callable[[Any], Any]

# ---- from optax ------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """From one rate to another."""

    start: float
    end: float
    steps: float = 1


class Curve(NamedTuple):
    """A schedule that begins at `base`."""

    base: float
    spec: Spec


Piece = Line | Curve
Pieces = list[tuple[Piece, float]]
"""What follows one another, and the update before which each ends, counted from the first; the last has no end."""


def read_schedule(function: Schedule, factor: float = 1.0) -> tuple[float, list[Spec]]:
    """The base rate and the schedules of a recipe that give `factor` times what a schedule of optax gives."""
    if origin(function) == "rate_of":
        free = free_variables(function)
        return free["lr"] * factor, [scale_rates(spec, factor) for spec in free["specs"]]
    pieces = _pieces(function, factor)
    bases = list(dict.fromkeys(piece.base for piece, _ in pieces if isinstance(piece, Curve)))
    if len(bases) > 1:
        listed = ", ".join(f"{abs(base):g}" for base in bases)
        raise UnsupportedError(
            f"the schedule has curves that begin at different rates ({listed}), and in a recipe they share one",
            hint="give them the same initial value",
        )
    rates = [rate for piece, _ in pieces if isinstance(piece, Line) for rate in (piece.start, piece.end)]
    base = bases[0] if bases else max(rates, key=abs)
    if len(pieces) == 1 and isinstance(piece := pieces[0][0], Line) and piece.start == piece.end:
        return base, []
    return base, [_spec(piece, end, base) for piece, end in pieces]


def scale_rates(spec: Spec, factor: float) -> Spec:
    """Two numbers are rates themselves."""
    return Spec(spec.name, {key: value * factor if key in _RATES else value for key, value in spec.options.items()})


_RATES = ("min", "end")


def _spec(piece: Piece, end: float, base: float) -> Spec:
    until = {"until": end} if math.isfinite(end) else {}
    if isinstance(piece, Curve):
        return Spec(piece.spec.name, {**piece.spec.options, **until})
    factors = {"start_factor": piece.start / base, "end_factor": piece.end / base} if base else {}
    if not base or (piece.start == piece.end == base):
        return Spec("constant", until)
    return Spec("linear", {"steps": piece.steps, **factors, **until})


def _pieces(function: Schedule, factor: float) -> Pieces:
    maker, free = origin(function), free_variables(function)
    if maker not in _READERS:
        raise UnsupportedError(
            f"the schedule `{maker}` is a function that cannot be read",
            hint="make it of optax's own schedules, with `optax.join_schedules`",
        )
    return _READERS[maker](free, factor)


def _constant(free: Mapping[str, Any], factor: float) -> Pieces:
    value = float(free.get("value", free.get("init_value", 0.0))) * factor
    return [(Line(value, value), math.inf)]


def _polynomial(free: Mapping[str, Any], factor: float) -> Pieces:
    if "transition_steps" not in free:
        return _constant(free, factor)
    start, end = float(free["init_value"]) * factor, float(free["end_value"]) * factor
    steps, power = float(free["transition_steps"]), float(free["power"])
    curve = Curve(start, Spec("polynomial", {"steps": steps, "power": power, "end": end}))
    piece = Line(start, end, steps) if power == 1 else curve
    return _after(float(free["transition_begin"]), start, [(piece, math.inf)])


def _exponential(free: Mapping[str, Any], factor: float) -> Pieces:
    if "transition_steps" not in free:
        return _constant(free, factor)
    start, rate, steps = float(free["init_value"]) * factor, float(free["decay_rate"]), float(free["transition_steps"])
    if free["staircase"]:
        curve = Curve(start, Spec("step", {"size": steps, "gamma": rate}))
    else:
        curve = Curve(start, Spec("exponential", {"gamma": rate ** (1 / steps)}))
    pieces: Pieces = [(curve, math.inf)]
    if free.get("end_value") is not None:
        pieces = _limit_curve(curve, float(free["end_value"]) * factor, rate, steps, bool(free["staircase"]))
    return _after(float(free["transition_begin"]), start, pieces)


def _limit_curve(curve: Curve, limit: float, rate: float, steps: float, staircase: bool) -> Pieces:
    """An exponential curve until it is at a limit, and that limit from then on."""

    def passed(n: int) -> bool:
        there = abs(curve.base) * rate ** (n // steps if staircase else n / steps)
        return there <= abs(limit) if rate < 1 else there >= abs(limit)

    last: Piece = Line(limit, limit)
    if passed(0):
        return [(last, math.inf)]
    if rate == 1 or not limit:
        return [(curve, math.inf)]
    end = max(math.floor(steps * math.log(limit / curve.base) / math.log(rate)) - 1, 1)
    while not passed(end):
        end += 1
    return [(curve, end), (last, math.inf)]


def _cosine(free: Mapping[str, Any], factor: float) -> Pieces:
    if float(free["exponent"]) != 1:
        raise UnsupportedError("cosine_decay_schedule with an exponent has no counterpart in a recipe")
    start = float(free["init_value"]) * factor
    numbers = {"steps": float(free["decay_steps"]), "min": start * float(free["alpha"])}
    return [(Curve(start, Spec("cosine", numbers)), math.inf)]


def _piecewise_constant(free: Mapping[str, Any], factor: float) -> Pieces:
    value = float(free["init_value"]) * factor
    changes = sorted((free["boundaries_and_scales"] or {}).items())
    scales = {float(scale) for _, scale in changes}
    if len(scales) == 1 and changes[0][0] >= 0:
        numbers = {"milestones": [float(boundary) for boundary, _ in changes], "gamma": scales.pop()}
        return [(Curve(value, Spec("multistep", numbers)), math.inf)]
    pieces: Pieces = []
    for boundary, scale in changes:
        pieces.append((Line(value, value), float(boundary)))
        value *= float(scale)
    return _clip_pieces([*pieces, (Line(value, value), math.inf)], math.inf)


def _piecewise_interpolated(free: Mapping[str, Any], factor: float) -> Pieces:
    bounds = [0.0, *map(float, free["boundaries"])]
    values = [float(free["init_value"]) * factor]
    for scale in free["scales"]:
        values.append(values[-1] * float(scale))
    if free["interpolate_fn"].__name__ == "_linear_interpolate":
        lines: Pieces = [
            (Line(*rates, end - start), end)
            for rates, (start, end) in zip(pairwise(values), pairwise(bounds), strict=True)
        ]
        return _clip_pieces([*lines, (Line(values[-1], values[-1]), math.inf)], math.inf)
    if len(bounds) == 2:
        return [(Curve(values[0], Spec("cosine", {"steps": bounds[1], "min": values[1]})), math.inf)]
    if len(bounds) == 3 and 0 < bounds[1] < bounds[2]:
        start, peak, end = values
        numbers = {
            "steps": bounds[2] + 1,
            "pct_start": (bounds[1] + 1) / (bounds[2] + 1),
            "div_factor": peak / start,
            "final_div_factor": start / end,
        }
        return [(Curve(peak, Spec("one_cycle", numbers)), math.inf)]
    raise UnsupportedError("a recipe has no chain of more than two cosine curves up and down")


def _join_pieces(free: Mapping[str, Any], factor: float) -> Pieces:
    ends = [*map(float, free["boundaries"]), math.inf]
    pieces: Pieces = []
    for function, start, end in zip(free["schedules"], [0.0, *ends], ends, strict=False):
        pieces += [(piece, start + last) for piece, last in _clip_pieces(_pieces(function, factor), end - start)]
    return pieces


def _clip_pieces(pieces: Pieces, length: float) -> Pieces:
    """What of them happens within so many updates."""
    kept: Pieces = []
    start = 0.0
    for piece, end in pieces:
        if start < min(end, length):
            kept.append((piece, min(end, length)))
            start = min(end, length)
    return kept


def _after(begin: float, value: float, pieces: Pieces) -> Pieces:
    """The same after a time at a constant rate."""
    return [(Line(value, value), begin), *((piece, begin + end) for piece, end in pieces)] if begin else pieces


_READERS: dict[str, Callable[[Mapping[str, Any], float], Pieces]] = {
    "constant_schedule": _constant,
    "polynomial_schedule": _polynomial,
    "exponential_decay": _exponential,
    "cosine_decay_schedule": _cosine,
    "piecewise_constant_schedule": _piecewise_constant,
    "piecewise_interpolate_schedule": _piecewise_interpolated,
    "join_schedules": _join_pieces,
}

# ---- to optax --------------------------------------------------------------------------------------------------------


def make_schedule(specs: Sequence[Spec], lr: float, ox: Any = OBJECTS) -> Any:
    """The rate, or the schedule of optax, that these schedules of a recipe give with a base rate.

    Where optax has none that computes the same, it is a function that does. `ox` has both (see objects.py).
    """
    if not specs:
        return lr
    made = [function for spec in specs if (function := _native(ox, spec.without("until"), lr))]
    if len(made) < len(specs):
        return ox.rate_of(specs, lr)
    return made[0] if len(made) == 1 else ox.join_schedules(made, [int(s.options["until"]) for s in specs[:-1]])


def _native(ox: Any, spec: Spec, lr: float) -> Schedule | None:
    numbers = {name: value for name, value in spec.options.items() if name not in ("warmup", "warmup_start")}
    warmup = float(spec.options.get("warmup", 0))
    if warmup and "steps" in numbers:
        numbers["steps"] -= warmup
    make = _WRITERS.get(spec.name) if numbers.pop("every", 1) == 1 else None
    found = make(ox, lr, **numbers) if make else None
    if found is None or not warmup:
        return found
    rising = ox.linear_schedule(lr * float(spec.options.get("warmup_start", 0)), lr, int(warmup))
    return ox.join_schedules([rising, found], [int(warmup)]) if warmup == int(warmup) else None


def _cosine_schedule(ox: Any, lr: float, steps: float, min: float = 0.0, after: str = "floor") -> Schedule | None:
    return ox.cosine_decay_schedule(lr, steps, min / lr) if after == "floor" and lr else None


def _one_cycle_schedule(
    ox: Any,
    lr: float,
    steps: float,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    anneal: str = "cos",
    three_phase: bool = False,
) -> Schedule | None:
    """optax has its peaks at whole updates."""
    peak, last = pct_start * steps - 1, steps - 1
    if three_phase or abs(peak - round(peak)) > 1e-9 or not 0 < round(peak) < last or last != int(last):
        return None
    scales = {round(peak): div_factor, int(last): 1 / (div_factor * final_div_factor)}
    return ox.piecewise_interpolate_schedule("cosine" if anneal == "cos" else "linear", lr / div_factor, scales)


def _multistep_schedule(ox: Any, lr: float, milestones: Sequence[float] | float, gamma: float = 0.1) -> Schedule | None:
    listed = list(milestones) if isinstance(milestones, Sequence) else [milestones]
    if len(set(listed)) < len(listed):
        return None
    return ox.piecewise_constant_schedule(lr, dict.fromkeys(listed, gamma))


_WRITERS: dict[str, Callable[..., Schedule | None]] = {
    "constant": lambda ox, lr: ox.constant_schedule(lr),
    "step": lambda ox, lr, size, gamma=0.1: ox.exponential_decay(lr, size, gamma, staircase=True),
    "multistep": _multistep_schedule,
    "exponential": lambda ox, lr, gamma: ox.exponential_decay(lr, 1, gamma) if gamma else None,
    "linear": lambda ox, lr, steps, start_factor=1.0, end_factor=0.0: ox.linear_schedule(
        lr * start_factor, lr * end_factor, steps
    ),
    "polynomial": lambda ox, lr, steps, power=1.0, end=0.0: ox.polynomial_schedule(lr, end, power, steps),
    "cosine": _cosine_schedule,
    "one_cycle": _one_cycle_schedule,
    "warmup": lambda ox, lr, steps, start_factor=0.0: ox.linear_schedule(lr * start_factor, lr, steps),
}
