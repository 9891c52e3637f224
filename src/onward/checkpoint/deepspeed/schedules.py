"""Schedulers of DeepSpeed in words of a recipe. Their state is a counter; their numbers are in the configuration.

A scheduler of DeepSpeed is a step behind: it is asked for the rate of an update after the one before, and the first
update has a rate of its own. What a class does while it warms up may have no words; once that is over, it does not
matter any more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from onward.checkpoint.pytorch.schedules import is_schedule_state, schedule_of
from onward.recipe.spec import Spec
from onward.run_state.state import SchedulerState


class Found(NamedTuple):
    schedule: SchedulerState
    base: float | None
    """The rate that the words multiply; None where that is the one of the optimizer."""


def scheduler_of(state: Any, config: Mapping[str, Any], given: float | None, groups: Sequence[Any] = ()) -> Found:
    """What the state of a scheduler and the configuration say. `given` is the rate of the optimizer in the latter.

    A program may have a scheduler that DeepSpeed does not know of. Those of PyTorch leave a trace in `groups`.
    """
    if state is None:
        is_moved = any("initial_lr" in group for group in groups)
        return Found(SchedulerState({}, None if is_moved else ()), None)
    if is_schedule_state(state):
        return Found(dataclasses.replace(schedule_of(state), every=1), None)  # its engine steps it with every update
    if not isinstance(state, Mapping) or type(state.get("last_batch_iteration")) is not int:
        return Found(SchedulerState(state if isinstance(state, Mapping) else {}), None)
    position = state["last_batch_iteration"] + 1
    kind = config.get("type") if isinstance(config, Mapping) else None
    numbers = config.get("params") if isinstance(config, Mapping) else None
    read = _READERS.get(str(kind))
    if read is None or not isinstance(numbers, Mapping) or not _all_plain(numbers):
        return Found(SchedulerState(state, None, position, every=1), None)
    words, base = read(numbers, given, position)
    return Found(SchedulerState(state, words, position, every=1), base)


def _all_plain(numbers: Mapping[str, Any]) -> bool:
    """Whether all groups have the same numbers, and none is left to something else."""
    return all(type(value) in (int, float, str, bool, type(None)) and value != "auto" for value in numbers.values())


Words = tuple[tuple[Spec, ...] | None, float | None]


def _warm_up(numbers: Mapping[str, Any], given: float | None, position: int, *, decays: bool) -> Words:
    highest = numbers.get("warmup_max_lr", 0.001 if decays else given)
    if not highest:
        return None, None
    lowest = numbers.get("warmup_min_lr", 0.0) / highest
    steps = _steps(numbers)
    pieces = _rise(numbers, position, first=lowest, low=lowest, until=steps + 1)
    if pieces is None:
        return None, highest
    if not decays:
        return (*pieces, Spec("constant")), highest
    rest = numbers["total_num_steps"] - steps
    end = _line(lowest, lowest) if rest < 1 else Spec("linear", {"steps": rest, "end_factor": lowest})
    return (*pieces, end), highest


def _cosine(numbers: Mapping[str, Any], given: float | None, position: int) -> Words:
    """Its cosine begins a step before the warm-up ends, for which there are no words: only when that is over."""
    steps = _steps(numbers)
    if given is None or position <= steps:
        return None, None
    pieces = _rise(numbers, position, first=0.0, low=numbers.get("warmup_min_ratio", 0.0), until=steps)
    rest = max(1, numbers["total_num_steps"] - steps)
    lowest = max(0.0, numbers.get("cos_min_ratio", 0.0001)) * given
    return (*(pieces or ()), Spec("cosine", {"steps": rest, "min": lowest, "after": "floor"})), given


def _rise(
    numbers: Mapping[str, Any], position: int, *, first: float, low: float, until: int
) -> tuple[Spec, ...] | None:
    """From the first update on until so many are done; None where there are no words for it, and it matters."""
    steps = _steps(numbers)
    if numbers.get("warmup_type", "log") != "linear" and position <= steps:
        return None
    rise = Spec("linear", {"steps": steps, "start_factor": low, "end_factor": 1.0, "until": until})
    return Spec("linear", {**_line(first, first).options, "until": 1}), rise


def _line(start: float, end: float) -> Spec:
    return Spec("linear", {"steps": 1, "start_factor": start, "end_factor": end})


def _steps(numbers: Mapping[str, Any]) -> int:
    return max(2, int(numbers.get("warmup_num_steps", 1000)))


_READERS: dict[str, Callable[[Mapping[str, Any], float | None, int], Words]] = {
    "WarmupLR": lambda numbers, given, position: _warm_up(numbers, given, position, decays=False),
    "WarmupDecayLR": lambda numbers, given, position: _warm_up(numbers, given, position, decays=True),
    "WarmupCosineLR": _cosine,
}
"""By the class; `OneCycle` and `LRRangeTest` have no words."""
