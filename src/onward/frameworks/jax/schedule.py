"""Schedules of optax: read as those of a recipe, and made from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from onward.errors import UnsupportedError
from onward.frameworks.jax.closures import free_variables, origin
from onward.frameworks.jax.updates import OBJECTS
from onward.recipe.schedules import schedule
from onward.recipe.spec import Spec
from onward.vocabulary.optax import (
    SCHEDULE_CALLS,
    SCHEDULES,
    Pieces,
    RateCurve,
    RateLine,
    clip_pieces,
    line_call,
    scale_rates,
    words_of_pieces,
)

Schedule = Callable[[Any], Any]


def read_schedule(function: Schedule, factor: float = 1.0) -> tuple[float, list[Spec]]:
    """Return the base rate and the schedules of a recipe for `factor` times a schedule of optax."""
    if origin(function) == "rate_of":
        free = free_variables(function)
        return free["lr"] * factor, [scale_rates(spec, factor) for spec in free["specs"]]
    scaled: Pieces = []
    for piece, end in _pieces(function):
        if isinstance(piece, RateLine):
            scaled.append((RateLine(piece.start * factor, piece.end * factor, piece.steps), end))
        else:
            scaled.append((RateCurve(piece.base * factor, scale_rates(piece.spec, factor)), end))
    return words_of_pieces(scaled)


def _pieces(function: Schedule) -> Pieces:
    maker, free = origin(function), free_variables(function)
    if maker == "join_schedules":
        ends = [*map(float, free["boundaries"]), math.inf]
        pieces: Pieces = []
        for inner, start, end in zip(free["schedules"], [0.0, *ends], ends, strict=False):
            pieces += [(piece, start + last) for piece, last in clip_pieces(_pieces(inner), end - start)]
        return pieces
    if maker not in SCHEDULES:
        raise UnsupportedError(
            f"the schedule `{maker}` is not one of optax",
            hint="use schedules of optax, with `optax.join_schedules`",
        )
    return SCHEDULES[maker](free)


def make_schedule(specs: Sequence[Spec], lr: float, ox: Any = OBJECTS) -> Any:
    """Return a rate or a schedule of optax for schedules of a recipe and a base rate.

    If optax has none that computes the same, return a function that does. `ox` has both (see
    `OptaxObjects`).
    """
    if not specs:
        return lr
    schedules = [function for spec in specs if (function := _native(ox, spec.without("until"), lr))]
    if len(schedules) < len(specs):
        return ox.rate_of(specs, lr)
    return (
        schedules[0]
        if len(schedules) == 1
        else ox.join_schedules(schedules, [int(s.options["until"]) for s in specs[:-1]])
    )


def _native(ox: Any, spec: Spec, lr: float) -> Any:
    numbers, choices = schedule(spec.name).resolve(spec.options)
    settings = {**numbers, **choices, **spec.options}
    warmup = settings.get("warmup", 0)
    if warmup and "steps" in settings:
        settings["steps"] -= warmup
    write = SCHEDULE_CALLS.get(spec.name) if settings.get("every", 1) == 1 else None
    call = write(lr, settings) if write else None
    if call is None or warmup != int(warmup):
        return None
    curve = _make(ox, call)
    if not warmup:
        return curve
    rising = _make(ox, line_call(lr * float(settings["warmup_start"]), lr, int(warmup)))
    return ox.join_schedules([rising, curve], [int(warmup)])


def _make(ox: Any, call: tuple[str, dict[str, Any]]) -> Any:
    name, arguments = call
    return getattr(ox, name)(**arguments)
