"""Schedulers of DeepSpeed in words of a recipe. Their state is a counter; the configuration has
their numbers.

A scheduler of DeepSpeed is one step behind: it computes the rate of an update after the one before,
and the first update has its own rate. A warm-up without words does not matter once it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from onward.recipe.spec import Spec

ScheduleWords = tuple[tuple[Spec, ...] | None, float | None]
"""Schedules or None, and the rate that they multiply; None: the rate of the optimizer."""


def schedule_words(config: Any, rate: float | None, position: int) -> ScheduleWords:
    """Return the schedules of a configuration.

    Args:
        config: the part `scheduler` of DeepSpeed's configuration
        rate: the rate of the optimizer in the configuration
        position: the updates so far
    """
    class_name = config.get("type") if isinstance(config, Mapping) else None
    numbers = config.get("params") if isinstance(config, Mapping) else None
    read = _READERS.get(str(class_name))
    if read is None or not isinstance(numbers, Mapping):
        return None, None
    # A list has a number for each group; "auto" depends on the program.
    is_plain = all(type(value) in (int, float, str, bool, type(None)) and value != "auto" for value in numbers.values())
    return read(numbers, rate, position) if is_plain else (None, None)


def _warm_up(numbers: Mapping[str, Any], rate: float | None, position: int, *, decays: bool) -> ScheduleWords:
    highest = numbers.get("warmup_max_lr", 0.001 if decays else rate)
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


def _cosine(numbers: Mapping[str, Any], rate: float | None, position: int) -> ScheduleWords:
    """Return the cosine after warm-up. It starts one step earlier, without words for that."""
    steps = _steps(numbers)
    if rate is None or position <= steps:
        return None, None
    pieces = _rise(numbers, position, first=0.0, low=numbers.get("warmup_min_ratio", 0.0), until=steps)
    rest = max(1, numbers["total_num_steps"] - steps)
    lowest = max(0.0, numbers.get("cos_min_ratio", 0.0001)) * rate
    return (*(pieces or ()), Spec("cosine", {"steps": rest, "min": lowest, "after": "floor"})), rate


def _rise(
    numbers: Mapping[str, Any], position: int, *, first: float, low: float, until: int
) -> tuple[Spec, ...] | None:
    """Return the warm-up of `until` updates; None without words for a warm-up that is not over."""
    steps = _steps(numbers)
    if numbers.get("warmup_type", "log") != "linear" and position <= steps:
        return None
    rise = Spec("linear", {"steps": steps, "start_factor": low, "end_factor": 1.0, "until": until})
    return Spec("linear", {**_line(first, first).options, "until": 1}), rise


def _line(start: float, end: float) -> Spec:
    return Spec("linear", {"steps": 1, "start_factor": start, "end_factor": end})


def _steps(numbers: Mapping[str, Any]) -> int:
    return max(2, int(numbers.get("warmup_num_steps", 1000)))


_READERS: dict[str, Callable[[Mapping[str, Any], float | None, int], ScheduleWords]] = {
    "WarmupLR": partial(_warm_up, decays=False),
    "WarmupDecayLR": partial(_warm_up, decays=True),
    "WarmupCosineLR": _cosine,
}
"""Class -> reader; `OneCycle` and `LRRangeTest` have no words."""
