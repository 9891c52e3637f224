"""Scheduler of Megatron in words of a recipe. It counts samples, and its state has all numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onward.recipe.spec import Spec

_NUMBERS = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "num_steps")


def schedule_words(state: Mapping[str, Any], first_rate: float, updates: int | None) -> tuple[Spec, ...] | None:
    """Return the schedules of a state, by updates; None without words for it.

    Args:
        state: the state of the scheduler
        first_rate: the rate at which the warm-up begins; only the arguments of the program have it
        updates: the updates so far
    """
    if not all(type(state.get(name)) in (int, float) for name in _NUMBERS) or not state["max_lr"]:
        return None
    samples = _samples(state, updates)
    if not samples:
        return None
    highest, lowest = state["max_lr"], state["min_lr"]
    warm_up = {"warmup": state["lr_warmup_steps"] / samples, "warmup_start": first_rate / highest}
    rise = warm_up if warm_up["warmup"] else {}
    steps = state["lr_decay_steps"] / samples
    if state.get("lr_decay_style") == "constant":
        return (Spec("constant", rise),) if rise else ()
    if steps <= warm_up["warmup"]:
        return None
    if state.get("lr_decay_style") == "cosine":
        return (Spec("cosine", {"steps": steps, "min": lowest, "after": "floor", **rise}),)
    if state.get("lr_decay_style") == "linear":
        return (Spec("linear", {"steps": steps, "end_factor": lowest / highest, **rise}),)
    return None


def _samples(state: Mapping[str, Any], updates: int | None) -> int | None:
    """Return the samples of an update; None if updates had different numbers of samples."""
    if not updates:
        return None if updates is None or state["num_steps"] else 1
    samples, rest = divmod(int(state["num_steps"]), updates)
    divides = bool(samples) and all(state[name] % samples == 0 for name in ("lr_warmup_steps", "lr_decay_steps"))
    return samples if divides and not rest else None


def advance_state(state: Mapping[str, Any], before: int | None, now: int) -> dict[str, Any]:
    """Return the state of a scheduler after `now` updates, from that after `before`."""
    samples = _samples(state, before) if all(name in state for name in _NUMBERS) else None
    return {**state, **({"num_steps": samples * now} if samples and now != before else {})}
