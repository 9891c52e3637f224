"""The scheduler of Megatron in words of a recipe. It counts samples, and says all of its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onward.recipe.spec import Spec
from onward.run_state.state import SchedulerState

_NUMBERS = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "num_steps")


def scheduler_of(state: Any, first_rate: float, updates: int | None) -> SchedulerState:
    """What a state says. `first_rate` is where its warm-up begins, which only the arguments know."""
    if not isinstance(state, Mapping):
        return SchedulerState({})
    numbers = [state.get(name) for name in _NUMBERS]
    if not all(type(number) in (int, float) for number in numbers) or not state["max_lr"]:
        return SchedulerState(state, None, updates, every=1)
    each = _samples(state, updates)
    return SchedulerState(state, _words(state, each, first_rate) if each else None, updates, every=1)


def _samples(state: Mapping[str, Any], updates: int | None) -> int | None:
    """Samples of an update, where all had as many."""
    if not updates:
        return None if updates is None or state["num_steps"] else 1
    whole, rest = divmod(int(state["num_steps"]), updates)
    divisible = all(state[name] % whole == 0 for name in ("lr_warmup_steps", "lr_decay_steps")) if whole else False
    return whole if divisible and not rest else None


def _words(state: Mapping[str, Any], each: int, first_rate: float) -> tuple[Spec, ...] | None:
    highest, lowest = state["max_lr"], state["min_lr"]
    warm_up = {"warmup": state["lr_warmup_steps"] / each, "warmup_start": first_rate / highest}
    rise = warm_up if warm_up["warmup"] else {}
    steps = state["lr_decay_steps"] / each
    if state.get("lr_decay_style") == "constant":
        return (Spec("constant", rise),) if rise else ()
    if steps <= warm_up["warmup"]:
        return None
    if state.get("lr_decay_style") == "cosine":
        return (Spec("cosine", {"steps": steps, "min": lowest, "after": "floor", **rise}),)
    if state.get("lr_decay_style") == "linear":
        return (Spec("linear", {"steps": steps, "end_factor": lowest / highest, **rise}),)
    return None


def advance_state(state: Mapping[str, Any], before: int | None, now: int) -> dict[str, Any]:
    """The state of a scheduler after so many updates."""
    each = _samples(state, before) if all(name in state for name in _NUMBERS) else None
    return {**state, **({"num_steps": each * now} if each and now != before else {})}
