"""Schedulers of PyTorch as schedules of a recipe and back."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from onward.errors import RecipeError, warn
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
    """Return the updates per step of the scheduler from `make_schedule`."""
    units = {int(spec.options.get("every", 1)) for spec in run.schedule}
    ends = [spec.options["until"] for spec in run.schedule if "until" in spec.options]
    unit = units.pop() if len(units) == 1 else 1
    return unit if all(end % unit == 0 for end in ends) else 1


def make_schedule(run: RunState, optimizer: Optimizer) -> LRScheduler | None:
    """Return the scheduler of a run at its position, or None for a fixed learning rate."""
    if not run.schedule:
        return None
    unit = updates_per_step(run)
    schedules = complete([(spec.without("until"), float(spec.options.get("until", FOREVER))) for spec in run.schedule])
    if unit > 1:  # count steps of the scheduler, not updates
        for schedule in schedules:
            schedule.pop("every", None)
            if "until" in schedule:
                schedule["until"] /= unit
    base_rates = [float(group["lr"]) for group in optimizer.param_groups]
    position = run.step // unit
    make = _native(schedules, position)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that the optimizer has made no step yet
        factors = [Factor(base, schedules) for base in base_rates]
        scheduler = make(optimizer) if make is not None else lr_scheduler.LambdaLR(optimizer, factors)
    for group, base in zip(optimizer.param_groups, base_rates, strict=True):
        group["lr"] = Factor(base, schedules).rate(position)
    _put_at(scheduler, position, [group["lr"] for group in optimizer.param_groups])
    return scheduler


def _put_at(scheduler: Any, position: int, rates: list[float]) -> None:
    """Set a scheduler to a position and its last learning rates."""
    scheduler.last_epoch, scheduler._last_lr = position, list(rates)
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        active = bisect_right(scheduler._milestones, position)
        start = scheduler._milestones[active - 1] if active else 0
        _put_at(scheduler._schedulers[active], position - start, rates)
        return
    scheduler._step_count = position + 1
    if isinstance(scheduler, lr_scheduler.CosineAnnealingWarmRestarts):
        vars(scheduler).update(restart_position(scheduler.T_0, scheduler.T_mult, position))


def _native(schedules: list[dict[str, Any]], position: int) -> Make | None:
    """Return a function that creates the PyTorch class which computes the same, if there is one."""
    makers = [make for schedule in schedules if (make := _maker(schedule, position)) is not None]
    ends = [schedule["until"] for schedule in schedules if "until" in schedule]
    if len(makers) < len(schedules) or not all(map(is_whole, ends)):
        return None
    if len(makers) == 1:
        return makers[0]
    if any(schedule["name"] == "one_cycle" for schedule in schedules):
        return None
    milestones = [int(end) for end in ends]
    return lambda optimizer: lr_scheduler.SequentialLR(optimizer, [make(optimizer) for make in makers], milestones)


def _maker(schedule: dict[str, Any], position: int) -> Make | None:
    if schedule["name"] == "one_cycle":
        settings = one_cycle_arguments(schedule, position)
        if settings is None:
            return None
        return lambda optimizer: lr_scheduler.OneCycleLR(
            optimizer, [float(group["lr"]) for group in optimizer.param_groups], **settings
        )
    if (match := class_of(schedule)) is None:
        return None
    class_name, arguments = match
    return lambda optimizer: getattr(lr_scheduler, class_name)(optimizer, **arguments)


# ---- reading ---------------------------------------------------------------------------------------------------------


class ReadSchedule(NamedTuple):
    """Schedule and position of a scheduler."""

    specs: list[Spec]
    """Schedules as in a `RunState`, empty for a fixed learning rate."""
    base_rates: list[float]
    """Initial learning rates of the optimizer's groups."""
    position: int
    """Steps of the scheduler so far."""
    every: int
    """Updates per step of the scheduler."""


def read_schedule(scheduler: LRScheduler, every: int = 1) -> ReadSchedule:
    """Return the schedules of a recipe for a scheduler that steps once in `every` updates."""
    problems = Problems(f"the scheduler {type(scheduler).__name__}")
    groups: list[dict[str, Any]] = scheduler.optimizer.param_groups
    key = "max_lr" if isinstance(scheduler, lr_scheduler.OneCycleLR) else "initial_lr"
    base_rates = [float(group.get(key, group["lr"])) for group in groups]
    counter: Any = scheduler
    while isinstance(counter, lr_scheduler.ChainedScheduler):
        counter = counter._schedulers[0]
    position = int(counter.last_epoch)
    try:
        pieces = _Reader(problems, base_rates).pieces(scheduler)
    except _UnknownError:
        pieces = _table(scheduler, position, base_rates, problems)
    problems.refuse()
    schedules: list[dict[str, Any]] = []
    try:
        schedules = complete(pieces)
    except RecipeError as error:
        problems.add(error.message, error.hint or "use other numbers")
    problems.refuse()
    for base, group in zip(base_rates, groups, strict=True):
        expected, actual = Factor(base, schedules).rate(position), float(group["lr"])
        if not math.isclose(expected, actual, rel_tol=1e-6, abs_tol=1e-6 * base):
            problem = f"the learning rate is {actual:g}, but {expected:g} by the scheduler"
            problems.add(f"{problem} after {position} steps", "change the scheduler instead of the learning rate")
    problems.refuse()
    return ReadSchedule(in_words(pieces, every), base_rates, position, every)


class _UnknownError(Exception):
    """The formula of a scheduler is unknown."""


class _Reader:
    def __init__(self, problems: Problems, base_rates: Sequence[float]) -> None:
        self._problems = problems
        self._base_rates = base_rates

    def pieces(self, scheduler: LRScheduler) -> Pieces:
        scheduler_class = type(scheduler)
        name = scheduler_class.__name__
        if scheduler_class is getattr(lr_scheduler, name, None):
            if name in REFUSED_SCHEDULERS:
                self._problems.add(*REFUSED_SCHEDULERS[name])
                return []
            if name in SCHEDULERS:
                return SCHEDULERS[name].read(vars(scheduler))
        if isinstance(scheduler, lr_scheduler.SequentialLR):
            return self._sequence(scheduler)
        if isinstance(scheduler, lr_scheduler.ChainedScheduler):
            return self._chain(scheduler)
        if scheduler_class is lr_scheduler.LambdaLR:
            return self._lambda(scheduler)
        if scheduler_class is lr_scheduler.OneCycleLR:
            return self._one_cycle(scheduler)
        if scheduler_class is lr_scheduler.MultiplicativeLR:
            return self._multiplicative(scheduler)
        raise _UnknownError

    def _sequence(self, scheduler: Any) -> Pieces:
        # OneCycleLR changes the rates of the schedulers before it, and sequences in a sequence miscount their steps.
        strange = lr_scheduler.OneCycleLR | lr_scheduler.SequentialLR | lr_scheduler.ChainedScheduler
        if any(isinstance(inner, strange) for inner in scheduler._schedulers):
            raise _UnknownError
        return in_sequence([self.pieces(inner) for inner in scheduler._schedulers], scheduler._milestones)

    def _chain(self, scheduler: Any) -> Pieces:
        """Return a product of learning rates, if that is a schedule again."""
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
        raise _UnknownError

    def _lambda(self, scheduler: Any) -> Pieces:
        functions = scheduler.lr_lambdas
        # A `Factor` has the learning rate of its group, so compare schedules.
        meanings = [function.schedules if isinstance(function, Factor) else function for function in functions]
        are_equal = all(
            meaning is meanings[0] or (isinstance(meaning, list) and meaning == meanings[0]) for meaning in meanings
        )
        pieces = read_lambda(functions[0], self._base_rates) if are_equal else None
        if pieces is None:
            raise _UnknownError
        return pieces

    def _multiplicative(self, scheduler: Any) -> Pieces:
        """Return an exponential, if the factor is the same at all steps and for all groups."""
        factors = {function(step) for function in scheduler.lr_lambdas for step in _steps_to_compare()}
        if len(factors) == 1:
            return [(Spec("exponential", {"gamma": float(factors.pop())}), FOREVER)]
        raise _UnknownError

    def _one_cycle(self, scheduler: Any) -> Pieces:
        if scheduler.cycle_momentum:
            raise _UnknownError
        return one_cycle(vars(scheduler), scheduler.optimizer.param_groups[0])


# ---- tables ----------------------------------------------------------------------------------------------------------

_TABULATED = 10_000
"""Steps of a scheduler with an unknown formula that are tabulated."""


def _table(scheduler: Any, position: int, base_rates: Sequence[float], problems: Problems) -> Pieces:
    """Return the factors of a scheduler step by step: of a period, or of as many steps as are tabulated."""
    rates, changed = _future_rates(scheduler)
    if changed:
        problem = f"it changes `{changed[0]}`, which is constant in a training model"
        problems.add(problem, "set `cycle_momentum=False`, or change the learning rate only")
    factors = rates / np.where(base_rates, base_rates, 1.0)
    if not np.allclose(factors, factors[:, :1], rtol=1e-9, atol=0):
        problems.add("its groups have different factors", "use one function for all groups")
    column = factors[:, 0]
    period = _period(column)
    last = int(np.flatnonzero(column != column[-1]).max(initial=-1)) + 2
    after = f"repeats its {period:,} rates" if period else f"keeps its last rate after {len(column):,} steps"
    warn(f"{type(scheduler).__name__} is tabulated: it {after}")
    if period:
        return [(Spec("table", {"factors": np.roll(column[:period], position).tolist(), "after": "repeat"}), FOREVER)]
    past = [float(column[0])] * position
    if isinstance(scheduler, lr_scheduler.LambdaLR):
        past = [float(scheduler.lr_lambdas[0](step)) for step in range(position)]
    return [(Spec("table", {"factors": [*past, *column[:last].tolist()]}), FOREVER)]


def _future_rates(scheduler: Any) -> tuple[np.ndarray, list[str]]:
    """Return the rates of a copy for each step and group, and the names of other settings that it changes."""
    optimizer = torch.optim.SGD([torch.zeros(1)])
    optimizer.param_groups = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in scheduler.optimizer.param_groups
    ]
    twin = copy.deepcopy(scheduler, {id(scheduler.optimizer): optimizer})
    settings = [key for key in scheduler.optimizer.defaults if key != "lr"]
    before = [[group.get(key) for key in settings] for group in optimizer.param_groups]
    rates, changed = [], []
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # OneCycleLR and others end by an error
        warnings.simplefilter("ignore")
        for _ in range(_TABULATED):
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
            for old, group in zip(before, optimizer.param_groups, strict=True):
                changed += [key for key, value in zip(settings, old, strict=True) if group.get(key) != value]
            if changed:
                break
            twin.step()
    return np.array(rates), changed


def _period(factors: np.ndarray) -> int | None:
    """Return the shortest period of factors that are not constant at the end."""
    starts = np.flatnonzero(np.isclose(factors[1 : len(factors) // 2], factors[0], rtol=1e-12)) + 1
    if factors[-1] == factors[-2]:
        return None
    return next((int(n) for n in starts[:100] if np.allclose(factors[n:], factors[:-n], rtol=1e-12, atol=0)), None)


# ---- functions of LambdaLR -------------------------------------------------------------------------------------------

_COMPARED_STEPS = 400
"""Number of consecutive steps at which two schedules are compared."""


def read_lambda(function: Callable[[int], float], bases: Sequence[float]) -> Pieces | None:
    """Return the schedules of a function, or None if they are unknown."""
    if isinstance(function, Factor):
        rows = [dict(row) for row in function.schedules]
        ends = [row.pop("until", FOREVER) for row in rows]
        return [(Spec(row.pop("name"), row), end) for row, end in zip(rows, ends, strict=True)]
    name, numbers = _origin(function)
    reader = READERS.get(name)
    if reader is None or not numbers.keys() <= inspect.signature(reader).parameters.keys():
        candidates, numbers = _candidates(function, bases[0]), {}
    else:
        candidates = iter([reader(bases[0], **numbers)])
    for pieces in candidates:
        relative = len(set(bases)) > 1 and any(spec.options.get("min") or spec.options.get("end") for spec, _ in pieces)
        if not relative and _agrees(function, Factor(bases[0], complete(pieces)), numbers):
            return pieces
    return None


_DENSE = 20_000
"""Steps whose factors are all looked at, for a function of the user."""
_MOST_PIECES = 16


def _candidates(function: Callable[[int], float], base: float) -> Iterator[Pieces]:
    """Yield schedules that begin as a function does: powers, steps, cosines, lines one after another."""
    try:
        first = [float(function(step)) for step in range(3)]
    except Exception:  # of a function of the user
        return
    if first[0] == 1 and 0 < first[1] < 1:
        yield [(Spec("exponential", {"gamma": first[1]}), FOREVER)]
        yield [(Spec("inverse_sqrt", {"timescale": 1 / (first[1] ** -2 - 1)}), FOREVER)]
        cosine = (1 - first[2]) / (1 - first[1]) / 2 - 1  # of pi / steps: both distances from 1 are known
        if -1 < cosine < 1:
            steps = round(math.pi / math.acos(cosine))
            least = round(1 - 2 * (1 - first[1]) / (1 - math.cos(math.pi / steps)), 9)
            for after in ("floor", "torch"):
                yield [(Spec("cosine", {"steps": steps, "min": least * base, "after": after}), FOREVER)]
    factors = [float(function(step)) for step in range(_DENSE)]
    if set(factors) == {1.0}:
        yield [(Spec("constant"), FOREVER)]
    size = next((step for step, factor in enumerate(factors) if factor != factors[0]), 0)
    if size and factors[0] == 1:
        yield [(Spec("step", {"size": size, "gamma": factors[size]}), FOREVER)]
    yield from _lines(factors)


def _lines(factors: Sequence[float]) -> Iterator[Pieces]:
    """Yield straight lines, one after another, the last of which is constant."""
    pieces: Pieces = []
    start = 0
    while start < len(factors) and len(pieces) < _MOST_PIECES:
        slope, end = factors[min(start + 1, len(factors) - 1)] - factors[start], start
        while end + 1 < len(factors) and abs(factors[start] + slope * (end + 1 - start) - factors[end + 1]) < 1e-12:
            end += 1
        length = end - start if factors[end] != factors[start] else 1
        options = {"steps": length, "start_factor": factors[start], "end_factor": factors[end]}
        pieces.append((Spec("linear", options), end + 1 - start))
        start = end + 1
    if start == len(factors) and factors[-1] == factors[-2]:
        last, _ = pieces.pop()
        ends = list(accumulate(length for _, length in pieces))
        yield [*((spec, float(end)) for (spec, _), end in zip(pieces, ends, strict=True)), (last, FOREVER)]


def _origin(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of the function that created a function, and its numbers."""
    if isinstance(function, functools.partial):
        name, numbers = function.func.__name__, dict(function.keywords)
    else:
        name = getattr(function, "__qualname__", type(function).__name__).partition(".")[0]
        numbers = dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}
    name = name.removeprefix("_").removeprefix("get_").removesuffix("_lambda").removesuffix("_lr")
    return name, {key: value for key, value in numbers.items() if isinstance(value, int | float | str)}


def _steps_to_compare() -> set[int]:
    return {*range(_COMPARED_STEPS), *(2**i for i in range(24))}


def _agrees(function: Callable[[int], float], factor: Factor, numbers: Mapping[str, Any]) -> bool:
    total = int(sum(value for value in numbers.values() if isinstance(value, int | float) and value > 1))
    steps = {*_steps_to_compare(), *range(max(total - _COMPARED_STEPS, 0), total + _COMPARED_STEPS)}
    for value in numbers.values():
        if isinstance(value, int):
            steps |= {value - 1, value, value + 1}
    return all(math.isclose(factor(t), function(t), rel_tol=1e-9, abs_tol=1e-12) for t in steps if t >= 0)
