"""Schedulers of PyTorch as schedules of a recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from onward.errors import RecipeError
from onward.frameworks.torch.lambdas import read_lambda
from onward.frameworks.torch.schedulers import make_scheduler, updates_per_step
from onward.recipe.spec import Spec
from onward.run_state.problems import Problems
from onward.vocabulary.rate_formulas import FOREVER, Factor, Pieces, complete, in_words
from onward.vocabulary.torch_schedules import ROWS, in_sequence, one_cycle

__all__ = ["ReadSchedule", "make_scheduler", "read_scheduler", "updates_per_step"]


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


def read_scheduler(scheduler: LRScheduler, every: int = 1) -> ReadSchedule:
    """The schedules of a recipe that give the rates of a scheduler which steps once in `every` updates."""
    problems = Problems(f"the scheduler {type(scheduler).__name__}")
    base_rates = _base_rates(scheduler)
    pieces = _Reader(problems, base_rates).pieces(scheduler)
    problems.refuse()
    schedules = _complete(pieces, problems)
    problems.refuse()
    position = _position(scheduler)
    for base, group in zip(base_rates, _optimizer(scheduler).param_groups, strict=True):
        expected, found = Factor(base, schedules).rate(position), float(group["lr"])
        if not math.isclose(expected, found, rel_tol=1e-6, abs_tol=1e-6 * base):
            what = (
                f"the learning rate is {found:g}, and by the scheduler it would be {expected:g} after {position} steps"
            )
            problems.add(what, "change the scheduler instead of the rate")
    problems.refuse()
    return ReadSchedule(in_words(pieces, every), base_rates, position, every)


def _optimizer(scheduler: LRScheduler) -> Optimizer:
    return scheduler.optimizer


def _base_rates(scheduler: LRScheduler) -> list[float]:
    key = "max_lr" if isinstance(scheduler, lr_scheduler.OneCycleLR) else "initial_lr"
    return [float(group.get(key, group["lr"])) for group in _optimizer(scheduler).param_groups]


def _position(scheduler: LRScheduler) -> int:
    if isinstance(scheduler, lr_scheduler.ChainedScheduler):
        return _position(scheduler._schedulers[0])
    return int(scheduler.last_epoch)


def _complete(pieces: Pieces, problems: Problems) -> list[dict[str, Any]]:
    try:
        return complete(pieces)
    except RecipeError as error:
        problems.add(error.message, error.hint or "use other numbers")
        return []


# ---- one class after the other ---------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, problems: Problems, base_rates: Sequence[float]) -> None:
        self._problems = problems
        self._base_rates = base_rates

    def pieces(self, scheduler: LRScheduler) -> Pieces:
        kind = type(scheduler)
        if kind in _REFUSED:
            self._problems.add(*_REFUSED[kind])
        elif kind is getattr(lr_scheduler, kind.__name__, None) and kind.__name__ in ROWS:
            return ROWS[kind.__name__].read(vars(scheduler))
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
        same = all(_same(function, functions[0]) for function in functions)
        pieces = read_lambda(functions[0], self._base_rates) if same else None
        if pieces is None:
            what = "its function is not known" if same else "its groups have different functions"
            self._problems.add(what, "use one of torch.optim.lr_scheduler, or `transformers.get_scheduler`")
        return pieces or []

    def _one_cycle(self, scheduler: Any) -> Pieces:
        if scheduler.cycle_momentum:
            what = "it moves the momentum, which is a fixed number in a training model"
            self._problems.add(what, "make it with `cycle_momentum=False`")
        return one_cycle(vars(scheduler), _optimizer(scheduler).param_groups[0])


def _same(function: Any, other: Any) -> bool:
    """Formulas of ours know the rate of their group, and are the same if their schedules are."""
    if isinstance(function, Factor) and isinstance(other, Factor):
        return function.schedules == other.schedules
    return function is other


_REFUSED: dict[type[LRScheduler], tuple[str, str]] = {
    lr_scheduler.ReduceLROnPlateau: (
        "what it does depends on a measure that a training model does not see",
        "set the rate between runs, or use another scheduler",
    ),
    lr_scheduler.CyclicLR: ("a training model has no such cycles", "use CosineAnnealingWarmRestarts or OneCycleLR"),
    lr_scheduler.MultiplicativeLR: ("its function is not known", "use StepLR, MultiStepLR or ExponentialLR"),
}
"""What is wrong with them, and what to do."""
