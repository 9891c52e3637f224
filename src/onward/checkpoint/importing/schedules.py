"""The schedule of a checkpoint by updates, which it may count otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from onward.checkpoint.description import Checkpoint, Schedule
from onward.checkpoint.importing.optimizers import tells_optimizers
from onward.convert.rate_formulas import Factor, complete
from onward.convert.snapshot import Group as RunGroup
from onward.convert.snapshot import Snapshot
from onward.errors import UnsupportedError
from onward.recipe.spec import Spec, parse


def schedule_by_updates(
    checkpoint: Checkpoint, said: Any, step: int, groups: Sequence[RunGroup], base: Snapshot | None
) -> tuple[list[Spec], list[str]]:
    """The schedule by updates, and what is to be said of it."""
    if said is not None:
        given = [said] if isinstance(said, str | Mapping | Spec) else list(said)
        return [parse(each) for each in given], ["the schedule is the one that was given"]
    found = [each for each in checkpoint.schedules if each.words != ()]
    if not found:
        return [], []
    schedule = found[0]
    if schedule.words is None and base and not tells_optimizers(checkpoint):
        return list(base.schedule), ["the schedule is that of the model, with its optimizer"]
    if schedule.words is None:
        raise UnsupportedError(
            "the checkpoint does not tell the shape of its schedule",
            hint="say it: `--schedule cosine:steps=1000,warmup=50`, or `schedule=...`; `constant` if the rate stays",
        )
    every = _updates_per_step(schedule, step, checkpoint)
    words = [_by_updates(spec, every) for spec in schedule.words]
    _check_rates(schedule, groups, checkpoint)
    return words, [f"the schedule steps once in {every} updates"] if every > 1 else []


def _updates_per_step(schedule: Schedule, step: int, checkpoint: Checkpoint) -> int:
    position = schedule.position
    if position is None or position == step or not position:
        return 1
    epoch = checkpoint.progress.get("epoch")
    if epoch == position and step % position == 0:
        return step // position
    raise UnsupportedError(
        f"its scheduler made {position} steps, and there were {step} updates",
        hint="say the schedule by updates: `--schedule step:size=2,gamma=0.1,every=100`, or `schedule=...`",
    )


def _by_updates(spec: Spec, every: int) -> Spec:
    if every == 1:
        return spec
    end = {"until": spec.options["until"] * every} if "until" in spec.options else {}
    return Spec(spec.name, {**spec.options, "every": every, **end})


def _check_rates(schedule: Schedule, groups: Sequence[RunGroup], checkpoint: Checkpoint) -> None:
    """The rates that the optimizer has are those of the schedule, or it is another one."""
    assert schedule.words is not None
    parts = complete([(spec.without("until"), spec.options.get("until", math.inf)) for spec in schedule.words])
    stored = [group.settings.get("lr") for each in checkpoint.optimizers for group in each.groups]
    for group, rate in zip(groups, stored, strict=False):
        expected = Factor(group.lr, parts).rate(schedule.position or 0)
        if isinstance(rate, float) and not math.isclose(expected, rate, rel_tol=1e-5, abs_tol=1e-6 * group.lr):
            raise UnsupportedError(
                f"the learning rate is {rate:g}, and by its schedule it would be {expected:g} after "
                f"{schedule.position} steps",
                hint="say the schedule: `--schedule cosine:steps=1000`, or `schedule=...`",
            )
