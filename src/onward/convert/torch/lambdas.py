"""Functions that `LambdaLR` multiplies rates with, as words of a recipe: ours, and those of transformers.

A function of transformers is known by its name and its numbers. What is made of these is then compared with what the
function gives, so that another function of that name is found out.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onward.convert.torch.exact.rates import Factor
from onward.recipe.schedules import schedule
from onward.recipe.spec import Spec

Pieces = list[tuple[Spec, float]]
"""Schedules that follow one another, and the steps before which they end; the last has no end."""

FOREVER = math.inf
ENOUGH = 400
"""Steps at which two schedules are compared one by one, and then ever fewer."""


def read_lambda(function: Callable[[int], float], bases: Sequence[float]) -> Pieces | None:
    """The schedules that a function means, or None where that is not known."""
    if isinstance(function, Factor):
        return [(_spec(one), one.get("until", FOREVER)) for one in function.schedules]
    name, numbers = _origin(function)
    reader = _READERS.get(name)
    if reader is None or not numbers.keys() <= inspect.signature(reader).parameters.keys():
        return None
    pieces = reader(bases[0], **numbers)
    relative = len(set(bases)) > 1 and any(spec.options.get("min") or spec.options.get("end") for spec, _ in pieces)
    return pieces if not relative and _agrees(function, Factor(bases[0], complete(pieces)), numbers) else None


def complete(pieces: Pieces) -> list[dict[str, Any]]:
    """Schedules as `Factor` takes them, with all their numbers and choices."""
    completed: list[dict[str, Any]] = []
    for spec, until in pieces:
        numbers, choices = schedule(spec.name).resolve(spec.options)
        end = {"until": until} if until < FOREVER else {}
        completed.append({"name": spec.name, **numbers, **choices, **end})
    return completed


def _spec(one: Mapping[str, Any]) -> Spec:
    return Spec(one["name"], {key: value for key, value in one.items() if key not in ("name", "until")})


def _origin(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """The name of what made a function, and the numbers that it was made with."""
    if isinstance(function, functools.partial):
        name, numbers = function.func.__name__, dict(function.keywords)
    else:
        name = getattr(function, "__qualname__", type(function).__name__).partition(".")[0]
        numbers = dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}
    name = name.removeprefix("_").removeprefix("get_").removesuffix("_lambda").removesuffix("_lr")
    return name, {key: value for key, value in numbers.items() if isinstance(value, int | float | str)}


def _agrees(function: Callable[[int], float], factor: Factor, numbers: Mapping[str, Any]) -> bool:
    total = int(sum(value for value in numbers.values() if isinstance(value, int | float) and value > 1))
    steps = {*range(ENOUGH), *range(max(total - ENOUGH, 0), total + ENOUGH), *(2**i for i in range(24))}
    for value in numbers.values():
        if isinstance(value, int):
            steps |= {value - 1, value, value + 1}
    return all(math.isclose(factor(t), function(t), rel_tol=1e-9, abs_tol=1e-12) for t in steps if t >= 0)


# ---- transformers ----------------------------------------------------------------------------------------------------


def _constant(base: float, num_warmup_steps: int = 0) -> Pieces:
    return [(Spec("constant", {"warmup": num_warmup_steps}), FOREVER)]


def _linear(base: float, num_warmup_steps: int, num_training_steps: int) -> Pieces:
    return [(Spec("linear", {"steps": num_training_steps, "warmup": num_warmup_steps}), FOREVER)]


def _cosine(
    base: float, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5, min_lr_rate: float = 0.0
) -> Pieces:
    steps = num_warmup_steps + (num_training_steps - num_warmup_steps) / (2 * num_cycles)
    options = {"steps": steps, "min": base * min_lr_rate, "after": "torch", "warmup": num_warmup_steps}
    return [(Spec("cosine", options), FOREVER)]


def _restarts(base: float, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1) -> Pieces:
    period = (num_training_steps - num_warmup_steps) / num_cycles
    restarts = Spec("cosine_restarts", {"period": period, "warmup": num_warmup_steps})
    return [(restarts, num_training_steps), (_level(0.0), FOREVER)]


def _polynomial(
    base: float, num_warmup_steps: int, num_training_steps: int, lr_end: float, power: float, lr_init: float
) -> Pieces:
    options = {"steps": num_training_steps, "power": power, "end": lr_end, "warmup": num_warmup_steps}
    return [(Spec("polynomial", options), FOREVER)]


def _inverse_sqrt(base: float, num_warmup_steps: int, timescale: int, shift: int = 0) -> Pieces:
    return [(Spec("inverse_sqrt", {"timescale": timescale, "warmup": num_warmup_steps}), FOREVER)]


def _warmup_stable_decay(
    base: float,
    num_warmup_steps: int,
    num_stable_steps: int,
    num_decay_steps: int,
    warmup_type: str,
    decay_type: str,
    min_lr_ratio: float,
    num_cycles: float,
) -> Pieces:
    rise = Spec("linear", {"steps": max(num_warmup_steps, 1), "start_factor": min_lr_ratio, "end_factor": 1.0})
    if decay_type == "linear":
        fall = Spec("linear", {"steps": num_decay_steps, "end_factor": min_lr_ratio})
    else:
        fall = Spec(
            "cosine", {"steps": num_decay_steps / (2 * num_cycles), "min": base * min_lr_ratio, "after": "torch"}
        )
    stable = num_warmup_steps + num_stable_steps
    pieces = [(rise, num_warmup_steps), (Spec("constant"), stable), (fall, stable + num_decay_steps)]
    lasting = [
        (spec, end) for (spec, end), start in zip(pieces, (0, num_warmup_steps, stable), strict=True) if end > start
    ]
    return [*lasting, (_level(min_lr_ratio), FOREVER)]


def _level(factor: float) -> Spec:
    """The same rate at all steps: a part of the base rate."""
    return Spec("linear", {"steps": 1, "start_factor": factor, "end_factor": factor})


_READERS: dict[str, Callable[..., Pieces]] = {
    "constant": _constant,
    "constant_schedule": _constant,
    "constant_schedule_with_warmup": _constant,
    "linear_schedule_with_warmup": _linear,
    "cosine_schedule_with_warmup": _cosine,
    "cosine_with_hard_restarts_schedule_with_warmup": _restarts,
    "polynomial_decay_schedule_with_warmup": _polynomial,
    "inverse_sqrt_schedule": _inverse_sqrt,
    "wsd_scheduler": _warmup_stable_decay,
}
