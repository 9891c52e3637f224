"""Schedules of a recipe as schedulers of PyTorch: its own class where there is one, else a formula in LambdaLR."""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from onward.convert.rates import Factor, complete
from onward.convert.run import Run
from onward.convert.transformers_schedules import FOREVER

Make = Callable[[Optimizer], LRScheduler]


def updates_per_step(run: Run) -> int:
    """How many updates one step of the scheduler that `make_scheduler` makes stands for: those of an epoch, maybe."""
    units = {int(spec.options.get("every", 1)) for spec in run.schedule}
    ends = [spec.options["until"] for spec in run.schedule if "until" in spec.options]
    unit = units.pop() if len(units) == 1 else 1
    return unit if all(end % unit == 0 for end in ends) else 1


def make_scheduler(run: Run, optimizer: Optimizer) -> LRScheduler | None:
    """The scheduler that goes on where a run is, for an optimizer of `make_optimizer`; None where the rate is fixed."""
    if not run.schedule:
        return None
    unit = updates_per_step(run)
    schedules = _counted_in(unit, complete([(spec.without("until"), _end(spec.options)) for spec in run.schedule]))
    bases = [float(group["lr"]) for group in optimizer.param_groups]
    position = run.step // unit
    make = _native(schedules, position) or _by_formula
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no step of the optimizer comes before the first rate
        scheduler = make(optimizer, schedules)
    _put_at(scheduler, position)
    for group, base in zip(optimizer.param_groups, bases, strict=True):
        group["lr"] = Factor(base, schedules).rate(position)
    _remember_rates(scheduler, [group["lr"] for group in optimizer.param_groups])
    return scheduler


def _end(options: Mapping[str, Any]) -> float:
    return float(options.get("until", FOREVER))


def _counted_in(unit: int, schedules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Schedules by groups of updates, where they were by updates."""
    if unit == 1:
        return schedules
    counted = [{key: value for key, value in one.items() if key != "every"} for one in schedules]
    return [{**one, **({"until": one["until"] / unit} if "until" in one else {})} for one in counted]


def _by_formula(optimizer: Optimizer, schedules: list[dict[str, Any]]) -> LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, [Factor(float(group["lr"]), schedules) for group in optimizer.param_groups])


def _put_at(scheduler: Any, position: int) -> None:
    """Go on after so many steps."""
    scheduler.last_epoch = position
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        active = bisect_right(scheduler._milestones, position)
        start = scheduler._milestones[active - 1] if active else 0
        _put_at(scheduler._schedulers[active], position - start)
        return
    scheduler._step_count = position + 1
    if isinstance(scheduler, lr_scheduler.CosineAnnealingWarmRestarts):
        length = scheduler.T_0
        while position >= length and scheduler.T_mult > 1:
            position, length = position - length, length * scheduler.T_mult
        scheduler.T_cur, scheduler.T_i = position % length, length


def _remember_rates(scheduler: Any, rates: list[float]) -> None:
    scheduler._last_lr = list(rates)
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        active = bisect_right(scheduler._milestones, scheduler.last_epoch)
        _remember_rates(scheduler._schedulers[active], rates)


# ---- PyTorch's own ---------------------------------------------------------------------------------------------------


def _native(schedules: list[dict[str, Any]], position: int) -> Callable[[Optimizer, Any], LRScheduler] | None:
    """How to make the class that computes the same, if there is one."""
    made = [_maker(one, position) for one in schedules]
    ends = [one["until"] for one in schedules if "until" in one]
    makers = [make for make in made if make is not None]
    if len(makers) < len(schedules) or not all(_whole(end) for end in ends):
        return None
    if len(makers) == 1:
        return lambda optimizer, _: makers[0](optimizer)
    if any(one["name"] == "one_cycle" for one in schedules):
        return None
    milestones = [int(end) for end in ends]
    return lambda optimizer, _: lr_scheduler.SequentialLR(optimizer, [make(optimizer) for make in makers], milestones)


def _maker(schedule: dict[str, Any], position: int) -> Make | None:
    numbers = {key: value for key, value in schedule.items() if key not in ("name", "until")}
    if "warmup" in numbers or "every" in numbers:
        return None
    counts = [numbers[key] for key in ("steps", "size", "period", "mult") if key in numbers]
    if not all(_whole(count) for count in (*counts, *numbers.get("milestones", ()))):
        return None
    maker = _MAKERS.get(schedule["name"])
    return maker(numbers, position) if maker is not None else None


def _whole(number: float) -> bool:
    return math.isfinite(number) and number == int(number)


def _line(n: Mapping[str, Any], start: float, end: float) -> Make | None:
    if not (0 < start <= 1 and 0 <= end <= 1):
        return None  # LinearLR does not take it
    return lambda optimizer: lr_scheduler.LinearLR(optimizer, start, end, int(n["steps"]))


def _one_cycle(n: Mapping[str, Any], position: int) -> Make | None:
    if position >= n["steps"]:
        return None  # OneCycleLR is over then
    return lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer,
        [float(group["lr"]) for group in optimizer.param_groups],
        total_steps=int(n["steps"]),
        pct_start=n["pct_start"],
        anneal_strategy=n["anneal"],
        cycle_momentum=False,
        div_factor=n["div_factor"],
        final_div_factor=n["final_div_factor"],
        three_phase=n["three_phase"],
    )


_MAKERS: dict[str, Callable[[Mapping[str, Any], int], Make | None]] = {
    "constant": lambda n, _: lambda o: lr_scheduler.ConstantLR(o, 1.0, 1),
    "step": lambda n, _: lambda o: lr_scheduler.StepLR(o, int(n["size"]), n["gamma"]),
    "multistep": lambda n, _: lambda o: lr_scheduler.MultiStepLR(o, [int(m) for m in n["milestones"]], n["gamma"]),
    "exponential": lambda n, _: lambda o: lr_scheduler.ExponentialLR(o, n["gamma"]),
    "linear": lambda n, _: _line(n, n["start_factor"], n["end_factor"]),
    "warmup": lambda n, _: _line(n, n["start_factor"], 1.0),
    "polynomial": lambda n, _: (
        None if n["end"] else lambda o: lr_scheduler.PolynomialLR(o, int(n["steps"]), n["power"])
    ),
    "cosine": lambda n, _: (
        None if n["after"] == "floor" else lambda o: lr_scheduler.CosineAnnealingLR(o, int(n["steps"]), n["min"])
    ),
    "cosine_restarts": lambda n, _: (
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, int(n["period"]), int(n["mult"]), n["min"])
    ),
    "one_cycle": _one_cycle,
}
"""How to make PyTorch's class from the numbers of a schedule; None where its numbers are beyond the class."""
