"""Schedules of a recipe as schedulers of PyTorch: its own class where there is one, else a formula in LambdaLR."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from onward.run_state.state import RunState
from onward.vocabulary.rate_formulas import FOREVER, Factor, complete
from onward.vocabulary.torch_schedules import class_of, is_whole, restart_position

Make = Callable[[Optimizer], LRScheduler]


def updates_per_step(run: RunState) -> int:
    """How many updates one step of the scheduler that `make_scheduler` makes stands for: those of an epoch, maybe."""
    units = {int(spec.options.get("every", 1)) for spec in run.schedule}
    ends = [spec.options["until"] for spec in run.schedule if "until" in spec.options]
    unit = units.pop() if len(units) == 1 else 1
    return unit if all(end % unit == 0 for end in ends) else 1


def make_scheduler(run: RunState, optimizer: Optimizer) -> LRScheduler | None:
    """The scheduler that goes on where a run is, for an optimizer of `make_optimizer`; None where the rate is fixed."""
    if not run.schedule:
        return None
    unit = updates_per_step(run)
    schedules = _in_units(unit, complete([(spec.without("until"), _end(spec.options)) for spec in run.schedule]))
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


def _in_units(unit: int, schedules: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
        vars(scheduler).update(restart_position(scheduler.T_0, scheduler.T_mult, position))


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
    if len(makers) < len(schedules) or not all(is_whole(end) for end in ends):
        return None
    if len(makers) == 1:
        return lambda optimizer, _: makers[0](optimizer)
    if any(one["name"] == "one_cycle" for one in schedules):
        return None
    milestones = [int(end) for end in ends]
    return lambda optimizer, _: lr_scheduler.SequentialLR(optimizer, [make(optimizer) for make in makers], milestones)


def _maker(schedule: dict[str, Any], position: int) -> Make | None:
    if schedule["name"] == "one_cycle":
        return _one_cycle(schedule, position)
    found = class_of(schedule)
    if found is None:
        return None
    kind, arguments = found
    return lambda optimizer: getattr(lr_scheduler, kind)(optimizer, **arguments)


def _one_cycle(n: Mapping[str, Any], position: int) -> Make | None:
    if position >= n["steps"] or not is_whole(n["steps"]) or n.get("warmup") or n.get("every", 1) != 1:
        return None  # OneCycleLR is over then, or has no such thing
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
