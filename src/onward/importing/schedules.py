"""The schedule of a checkpoint by updates, checked against its stored learning rates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.name_matching import Match
from onward.errors import ArgumentError, UnsupportedError
from onward.inspect.formatting import quantity
from onward.options import MissingOptions
from onward.recipe.spec import Spec, parse
from onward.run_state.state import ParameterGroup, RunState, SchedulerState
from onward.run_state.tensors import is_number, number_of
from onward.vocabulary.rate_formulas import Factor, complete


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """Schedule of the learning rate that continues."""

    words: Sequence[Spec]
    """Schedules by updates; empty for a constant rate."""
    step: int
    """Updates made."""
    groups: Sequence[ParameterGroup]
    """Groups with the rates that the schedule multiplies."""
    notes: Mapping[str, bool]
    """Notes -> True for an assumption that changes numbers if it is wrong."""


def schedule_by_updates(
    checkpoint: Checkpoint,
    matched: Match,
    groups: Sequence[ParameterGroup],
    base: RunState | None,
    step: int | None,
    options: MissingOptions,
) -> Scheduled:
    """Return the schedule by updates: of the user, else the checkpoint, else the model `base`.

    It must give the stored learning rates. Without a schedule, these are constant.

    Args:
        step: updates made, if the checkpoint counts them.
        options: options of the user: `schedule`, `optimizer` and `updates_per_epoch`.

    Raises:
        UnsupportedError: the rates contradict the schedule, or its position in updates is unknown.
    """
    rates = [_rate_of(checkpoint, matched, group) for group in groups]
    says_rate = options.optimizer is not None and "lr" in parse(options.optimizer).options
    stored = next((schedule for schedule in checkpoint.own_schedules if schedule.words != ()), None)
    every = options.updates_per_epoch
    if (stated := options.schedule) is not None:
        listed = [stated] if isinstance(stated, str | Mapping | Spec) else stated
        words, origin = [parse(item) for item in listed], "given"
    elif stored is not None and stored.words is not None:
        words, origin = list(stored.words), ""
    elif base and base.schedule:
        words, origin = list(base.schedule), "that of the model"
        if not says_rate:  # it multiplies the stored rate before any schedule, or else that of the model
            own = {name: own_group.lr for own_group in base.groups for name in own_group.parameters}
            groups = [
                _with_rate(group, own.get(group.parameters[0]) if rate.first is None else rate.first)
                for group, rate in zip(groups, rates, strict=True)
            ]
    elif stored is not None and stored.state.get("cycle_momentum"):
        raise UnsupportedError(
            "its OneCycleLR changes the momentum, which training models keep constant",
            hint="train with `OneCycleLR(..., cycle_momentum=False)`",
        )
    elif stored is not None:
        raise UnsupportedError(
            "the checkpoint does not store the shape of its schedule",
            hint="set `--schedule cosine:steps=1000,warmup=50` (`schedule=...`), or `constant`",
        )
    else:
        words, origin = [], ""
    if words in ([], [Spec("constant")]):
        if not says_rate:
            groups = [_with_rate(group, rate.now) for group, rate in zip(groups, rates, strict=True)]
        return Scheduled([], step or 0, groups, dict.fromkeys(_notes_on_constant(groups, rates), not origin))
    if origin and every is not None:
        raise ArgumentError(
            f"`updates_per_epoch` has no effect: the schedule is {origin}",
            hint=f"count in epochs there: `--schedule '{words[0].name}:...,every={every}'`",
        )
    if not origin:
        assert stored is not None
        if stored.every is None and every is None:
            units = {int(spec.options.get("every", 1)) for spec in base.schedule} if base else set()
            every = units.pop() if len(units) == 1 else None
        step, every = _updates(checkpoint, stored, step, every)
        words = [_by_updates(spec, every) for spec in words]
    if step is None:
        raise UnsupportedError(
            f"`{checkpoint.path}` does not count the updates made, which its schedule needs",
            hint="set `--updates 1000` (`updates=...`)",
        )
    _check_rates(words, step, groups, rates, checkpoint)
    notes = {f"the schedule is {origin}": False} if origin else {}
    if not origin and every and every > 1:
        notes[f"the schedule steps once in {every} updates"] = False
    if not origin and base and base.schedule and list(base.schedule) != words:
        notes["the schedule is that of the checkpoint, not of the model"] = True
    return Scheduled(words, step, groups, notes)


def _updates(checkpoint: Checkpoint, schedule: SchedulerState, step: int | None, stated: int | None) -> tuple[int, int]:
    """Return the updates made and those per step of the scheduler, if these are unambiguous."""
    position = schedule.position or 0
    stored_every = schedule.every
    if None not in (stated, stored_every) and stated != stored_every:
        raise ArgumentError(
            f"`updates_per_epoch` is {stated}, and `{checkpoint.path}` counts {stored_every}",
            hint=f"omit it, or set {stored_every}",
        )
    every = stated or stored_every
    if step is None and every == 1:
        return position, 1
    if every is None and step is not None and 0 < step == position:
        return step, 1
    if step is not None and every is not None and step // every == position:
        return step, every
    progress = f"its scheduler made {quantity(position, 'step')}"
    if step is None:
        hint = "`--updates 1000 --updates-per-epoch 250`; or `--updates-per-epoch 1` if it steps with every update"
        if every is not None:
            hint = f"`--updates N` (`updates=N`), from {position * every} to {position * every + every - 1}"
        raise UnsupportedError(f"{progress}, and `{checkpoint.path}` does not count updates", hint=f"set {hint}")
    least, most = step // (position + 1) + 1, step // position if position else None
    if most is not None and least > most:
        raise UnsupportedError(
            f"{progress} in {step} updates, which no constant number for each gives",
            hint="set the schedule by updates: `--schedule step:size=2,gamma=0.1,every=100` (`schedule=...`)",
        )
    fitting = f"{least} or more" if most is None else f"{least}" if least == most else f"{least} to {most}"
    remainder = f", which is not one in {every}" if every is not None else ""
    raise UnsupportedError(
        f"{progress} in {quantity(step, 'update')}{remainder}",
        hint=f"set the updates of an epoch, {fitting}: `--updates-per-epoch {least}` (`updates_per_epoch={least}`)",
    )


def _by_updates(spec: Spec, every: int) -> Spec:
    if every == 1:
        return spec
    end = {"until": spec.options["until"] * every} if "until" in spec.options else {}
    return Spec(spec.name, {**spec.options, "every": every, **end})


class _Rate(NamedTuple):
    """Learning rate of a group as the checkpoint stores it; None if it does not."""

    now: float | None
    first: float | None
    """Rate before the schedule."""
    may_be_last: bool = False
    """True if `now` may be the last update's rate, as in optax's `inject_hyperparams`."""


def _rate_of(checkpoint: Checkpoint, matched: Match, group: ParameterGroup) -> _Rate:
    own = matched.theirs.get(group.parameters[0])
    for optimizer in checkpoint.optimizers:
        for own_group in optimizer.groups:
            if own in own_group.parameters:
                is_optax, settings = optimizer.variant == "optax", own_group.settings
                stored = settings.get("learning_rate" if is_optax else "lr", own_group.numbers.get("lr"))
                first = settings.get("max_lr", settings.get("initial_lr"))
                return _Rate(_number(stored), _number(first), is_optax)
    return _Rate(None, None)


def _number(stored: Any) -> float | None:
    return float(number_of(stored)) if stored is not None and is_number(stored) else None


def _with_rate(group: ParameterGroup, rate: float | None) -> ParameterGroup:
    spec = group.optimizer
    if rate is None or not isinstance(spec, Spec) or spec.options.get("lr") == rate:
        return group
    return dataclasses.replace(group, optimizer=Spec(spec.name, {**spec.options, "lr": rate}))


def _notes_on_constant(groups: Sequence[ParameterGroup], rates: Sequence[_Rate]) -> Iterator[str]:
    for group, rate in zip(groups, rates, strict=True):
        if None not in (rate.now, rate.first) and not math.isclose(rate.now or 0, rate.first or 0):
            yield f"without a schedule the learning rate stays at {group.lr:g}; it was {rate.first:g} at first"
            return


def _check_rates(
    words: Sequence[Spec], step: int, groups: Sequence[ParameterGroup], rates: Sequence[_Rate], checkpoint: Checkpoint
) -> None:
    """Raise an UnsupportedError for a schedule that does not give the stored rates."""
    parts = complete([(spec.without("until"), spec.options.get("until", math.inf)) for spec in words])
    for group, rate in zip(groups, rates, strict=True):
        if rate.now is None:
            continue
        formula = Factor(group.lr, parts)
        expected = [formula.rate(at) for at in ([step, max(step - 1, 0)] if rate.may_be_last else [step])]
        if not any(math.isclose(candidate, rate.now, rel_tol=1e-5, abs_tol=1e-6 * group.lr) for candidate in expected):
            raise UnsupportedError(
                f"the learning rate is {rate.now:g}, and {expected[0]:g} by its schedule after {step} updates",
                hint="set the schedule of the run, as `--schedule cosine:steps=1000` (`schedule=...`); if its first "
                f"rate was not {group.lr:g}, also `--optimizer adamw:lr=...`",
            )
