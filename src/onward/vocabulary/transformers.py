"""Schedules of transformers in words of a recipe, by the functions that make them."""

from __future__ import annotations

from collections.abc import Callable

from onward.recipe.spec import Spec
from onward.vocabulary.rate_formulas import FOREVER, Pieces


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
    """Return a constant fraction of the base rate."""
    return Spec("linear", {"steps": 1, "start_factor": factor, "end_factor": factor})


READERS: dict[str, Callable[..., Pieces]] = {
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
