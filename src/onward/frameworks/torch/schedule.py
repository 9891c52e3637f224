"""Schedulers of PyTorch as schedules of a recipe, and back."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from onward.errors import RecipeError
from onward.recipe.spec import Spec
from onward.run_state.problems import Problems
from onward.run_state.state import RunState
from onward.vocabulary.rate_formulas import FOREVER, Factor, Pieces, complete, in_words
from onward.vocabulary.torch_schedules import (
    REFUSED_SCHEDULERS,
    SCHEDULERS,
    class_of,
    in_sequence,
    is_whole,
    one_cycle,
    one_cycle_arguments,
    restart_position,
)
from onward.vocabulary.transformers import READERS

Make = Callable[[Optimizer], LRScheduler]


def updates_per_step(run: RunState) -> int:
    """How many updates one step of the scheduler that `make_scheduler` makes stands for: those of an epoch, maybe."""
    units = {int(spec.options.get("every", 1)) for spec in run.schedule}
    ends = [spec.options["until"] for spec in run.schedule if "until" in spec.options]
    unit = units.pop() if len(units) == 1 else 1
    return unit if all(end % unit == 0 for end in ends) else 1


def make_schedule(run: RunState, optimizer: Optimizer) -> LRScheduler | None:
    """Return the scheduler of a run, at its position, for an optimizer of `make_optimizer`; None if the rate is fixed.

    It is PyTorch's own where that computes the same, else a formula in LambdaLR.
    """
    if not run.schedule:
        return None
    unit = updates_per_step(run)
    schedules = complete([(one.without("until"), float(one.options.get("until", FOREVER))) for one in run.schedule])
    if unit > 1:  # by steps of the scheduler
        schedules = [{key: value for key, value in one.items() if key != "every"} for one in schedules]
        schedules = [{**one, **({"until": one["until"] / unit} if "until" in one else {})} for one in schedules]
    bases = [float(group["lr"]) for group in optimizer.param_groups]
    position = run.step // unit
    make = _native(schedules, position)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no step of the optimizer comes before the first rate
        if make is not None:
            scheduler = make(optimizer)
        else:
            scheduler = lr_scheduler.LambdaLR(optimizer, [Factor(base, schedules) for base in bases])
    _put_at(scheduler, position)
    for group, base in zip(optimizer.param_groups, bases, strict=True):
        group["lr"] = Factor(base, schedules).rate(position)
    _remember_rates(scheduler, [group["lr"] for group in optimizer.param_groups])
    return scheduler


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


def _native(schedules: list[dict[str, Any]], position: int) -> Make | None:
    """Return what makes the class that computes the same, if there is one."""
    made = [_maker(one, position) for one in schedules]
    ends = [one["until"] for one in schedules if "until" in one]
    makers = [make for make in made if make is not None]
    if len(makers) < len(schedules) or not all(is_whole(end) for end in ends):
        return None
    if len(makers) == 1:
        return makers[0]
    if any(one["name"] == "one_cycle" for one in schedules):
        return None
    milestones = [int(end) for end in ends]
    return lambda optimizer: lr_scheduler.SequentialLR(optimizer, [make(optimizer) for make in makers], milestones)


def _maker(schedule: dict[str, Any], position: int) -> Make | None:
    if schedule["name"] == "one_cycle":
        settings = one_cycle_arguments(schedule, position)
        return None if settings is None else functools.partial(_one_cycle, settings)
    if (found := class_of(schedule)) is None:
        return None
    kind, arguments = found
    return lambda optimizer: getattr(lr_scheduler, kind)(optimizer, **arguments)


def _one_cycle(settings: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, [float(group["lr"]) for group in optimizer.param_groups], **settings)


# ---- reading ---------------------------------------------------------------------------------------------------------


class ReadSchedule(NamedTuple):
    """What a scheduler says."""

    specs: list[Spec]
    """As a `RunState` has them; empty where the rate stays as it is."""
    base_rates: list[float]
    """What the optimizer's groups begin with."""
    position: int
    """The steps that the scheduler has made."""
    every: int
    """The updates between its steps."""


def read_schedule(scheduler: LRScheduler, every: int = 1) -> ReadSchedule:
    """Return the schedules of a recipe with the rates of a scheduler that steps once in `every` updates."""
    problems = Problems(f"the scheduler {type(scheduler).__name__}")
    groups: list[dict[str, Any]] = scheduler.optimizer.param_groups
    key = "max_lr" if isinstance(scheduler, lr_scheduler.OneCycleLR) else "initial_lr"
    base_rates = [float(group.get(key, group["lr"])) for group in groups]
    pieces = _Reader(problems, base_rates).pieces(scheduler)
    problems.refuse()
    schedules: list[dict[str, Any]] = []
    try:
        schedules = complete(pieces)
    except RecipeError as error:
        problems.add(error.message, error.hint or "use other numbers")
    problems.refuse()
    counter: Any = scheduler
    while isinstance(counter, lr_scheduler.ChainedScheduler):
        counter = counter._schedulers[0]
    position = int(counter.last_epoch)
    for base, group in zip(base_rates, groups, strict=True):
        expected, found = Factor(base, schedules).rate(position), float(group["lr"])
        if not math.isclose(expected, found, rel_tol=1e-6, abs_tol=1e-6 * base):
            what = f"the learning rate is {found:g}, and by the scheduler it would be {expected:g}"
            problems.add(f"{what} after {position} steps", "change the scheduler instead of the rate")
    problems.refuse()
    return ReadSchedule(in_words(pieces, every), base_rates, position, every)


class _Reader:
    def __init__(self, problems: Problems, base_rates: Sequence[float]) -> None:
        self._problems = problems
        self._base_rates = base_rates

    def pieces(self, scheduler: LRScheduler) -> Pieces:
        kind = type(scheduler)
        is_native = kind is getattr(lr_scheduler, kind.__name__, None)
        if is_native and kind.__name__ in REFUSED_SCHEDULERS:
            self._problems.add(*REFUSED_SCHEDULERS[kind.__name__])
        elif is_native and kind.__name__ in SCHEDULERS:
            return SCHEDULERS[kind.__name__].read(vars(scheduler))
        elif isinstance(scheduler, lr_scheduler.SequentialLR):
            return self._sequence(scheduler)
        elif isinstance(scheduler, lr_scheduler.ChainedScheduler):
            return self._chain(scheduler)
        elif kind is lr_scheduler.LambdaLR:
            return self._lambda(scheduler)
        elif kind is lr_scheduler.OneCycleLR:
            return self._one_cycle(scheduler)
        else:
            what = f"what a step of the class `{kind.__qualname__}` does is not known"
            self._problems.add(what, "use one of torch.optim.lr_scheduler")
        return []

    def _sequence(self, scheduler: Any) -> Pieces:
        for inner in scheduler._schedulers:
            if isinstance(inner, lr_scheduler.OneCycleLR):
                what = "OneCycleLR in a sequence changes the rates of the schedulers before it"
                self._problems.add(what, "let OneCycleLR be the only scheduler")
            if isinstance(inner, lr_scheduler.SequentialLR | lr_scheduler.ChainedScheduler):
                what = f"{type(inner).__name__} in a sequence miscounts its steps in PyTorch"
                self._problems.add(what, "give all schedulers to one SequentialLR")
        return in_sequence([self.pieces(inner) for inner in scheduler._schedulers], scheduler._milestones)

    def _chain(self, scheduler: Any) -> Pieces:
        """A product of rates, where that is a schedule again."""
        factors = [self.pieces(inner) for inner in scheduler._schedulers]
        moving = [pieces for pieces in factors if pieces != [(Spec("constant"), FOREVER)]]
        if len(moving) <= 1:
            return moving[0] if moving else factors[0]
        specs = [pieces[0][0] for pieces in moving if len(pieces) == 1]
        names, gammas = {spec.name for spec in specs}, [spec.options.get("gamma") for spec in specs]
        if len(specs) == len(moving) and names == {"exponential"}:
            return [(Spec("exponential", {"gamma": math.prod(gammas)}), FOREVER)]
        if len(specs) == len(moving) and names == {"multistep"} and len(set(gammas)) == 1:
            milestones = sorted(milestone for spec in specs for milestone in spec.options["milestones"])
            return [(Spec("multistep", {"milestones": milestones, "gamma": gammas[0]}), FOREVER)]
        self._problems.add("its rate is a product of schedules", "use SequentialLR, or a single scheduler")
        return []

    def _lambda(self, scheduler: Any) -> Pieces:
        functions = scheduler.lr_lambdas
        # Formulas of ours know the rate of their group, and are the same if their schedules are.
        kinds = [each.schedules if isinstance(each, Factor) else each for each in functions]
        same = all(kind is kinds[0] or (isinstance(kind, list) and kind == kinds[0]) for kind in kinds)
        pieces = read_lambda(functions[0], self._base_rates) if same else None
        if pieces is None:
            what = "its function is not known" if same else "its groups have different functions"
            self._problems.add(what, "use one of torch.optim.lr_scheduler, or `transformers.get_scheduler`")
        return pieces or []

    def _one_cycle(self, scheduler: Any) -> Pieces:
        if scheduler.cycle_momentum:
            what = "it moves the momentum, which is a fixed number in a training model"
            self._problems.add(what, "make it with `cycle_momentum=False`")
        return one_cycle(vars(scheduler), scheduler.optimizer.param_groups[0])


# ---- functions of LambdaLR -------------------------------------------------------------------------------------------

ENOUGH = 400
"""Steps at which two schedules are compared one by one, and then ever fewer."""


def read_lambda(function: Callable[[int], float], bases: Sequence[float]) -> Pieces | None:
    """The schedules that a function means, or None where that is not known."""
    if isinstance(function, Factor):
        rows = [dict(one) for one in function.schedules]
        return [(Spec(row.pop("name"), row), end) for row in rows for end in [row.pop("until", FOREVER)]]
    name, numbers = _origin(function)
    reader = READERS.get(name)
    if reader is None or not numbers.keys() <= inspect.signature(reader).parameters.keys():
        return None
    pieces = reader(bases[0], **numbers)
    relative = len(set(bases)) > 1 and any(spec.options.get("min") or spec.options.get("end") for spec, _ in pieces)
    return pieces if not relative and _agrees(function, Factor(bases[0], complete(pieces)), numbers) else None


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
