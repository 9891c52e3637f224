"""How two checkpoints go on: class and numbers of the optimizer, schedule, step, random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytorch.objects import Object
from onward.checkpoint.pytorch.optimizers import base_rate
from onward.inspect.formatting import quantity
from onward.recipe.optimizers import configure
from onward.recipe.spec import Spec
from onward.run_state.state import Group, Schedule
from onward.run_state.tensors import Tensor

_ONE_PART_IN = 1e-6
"""How far numbers may be apart: a training model has most of them in float32."""


class Fact(NamedTuple):
    """Something that both say, or one of them does not."""

    name: str
    a: Any
    """In words or numbers; None where it is not said."""
    b: Any
    equal: bool


def facts(a: Checkpoint, b: Checkpoint, names: Mapping[str, str]) -> Iterator[Fact]:
    """What two say about the training. `names` are those of the first, and what they are called in the second."""
    yield _fact("step", a.step, b.step)
    yield _families(a, b)
    yield from _groups(a, b, names)
    yield from _schedules(a, b)
    yield _fact("clipping", dict(a.clip or {}), dict(b.clip or {}))
    yield _fact("batches for an update", a.accumulate or 1, b.accumulate or 1)
    if a.scaler or b.scaler:
        yield _fact("scale of the loss", dict(a.scaler), dict(b.scaler))
    yield from _random_states(a, b)


def _fact(name: str, a: Any, b: Any) -> Fact:
    return Fact(name, _none(a), _none(b), same(a, b))


def _none(value: Any) -> Any:
    return None if isinstance(value, Mapping) and not value else value


def same(a: Any, b: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """Whether two trees are equal: numbers as far as float32 tells them apart, tensors exactly.

    `seen` are parts that are being compared, or have been: a tree may hold a part many times, and itself.
    """
    seen = set() if seen is None else seen
    if (id(a), id(b)) in seen:
        return True
    if isinstance(a, Mapping | list | tuple | Object):
        seen.add((id(a), id(b)))
    if isinstance(a, Tensor | np.ndarray) or isinstance(b, Tensor | np.ndarray):
        return _same_arrays(a, b)
    if isinstance(a, Spec) and isinstance(b, Spec):
        return a.name == b.name and same(a.options, b.options, seen)
    if isinstance(a, Object) and isinstance(b, Object):
        return same(vars(a), vars(b), seen)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key], seen) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y, seen) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) or isinstance(b, float):
        return isinstance(a, int | float) and isinstance(b, int | float) and _close(a, b)
    return bool(a == b)


def _same_arrays(a: Any, b: Any) -> bool:
    one, other = _array(a), _array(b)
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return False
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return bool(np.array_equal(one, other)) if one.dtype.hasobject else one.tobytes() == other.tobytes()


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_ONE_PART_IN, abs_tol=1e-30) or (math.isnan(a) and math.isnan(b))


def _array(value: Any) -> Any:
    return value.array() if isinstance(value, Tensor) else value


# ---- optimizers ------------------------------------------------------------------------------------------------------


def _families(a: Checkpoint, b: Checkpoint) -> Fact:
    one, other = ("; ".join(each.title for each in checkpoint.optimizers) for checkpoint in (a, b))
    return Fact("optimizer", one or None, other or None, one == other)


def _groups(a: Checkpoint, b: Checkpoint, names: Mapping[str, str]) -> Iterator[Fact]:
    """Hyper-parameters, compared for parameters that two groups have in common."""
    theirs = _by_parameter(b)
    both: dict[tuple[int, int], tuple[Group, Group, list[Any]]] = {}
    for name, group in _by_parameter(a).items():
        if (other := theirs.get(names.get(str(name), name))) is not None:
            both.setdefault((id(group), id(other)), (group, other, []))[2].append(name)
    for one, other, parameters in both.values():
        where = "" if len(both) == 1 else f" of {len(parameters)} parameters, {parameters[0]} first"
        yield from (_fact(f"{key}{where}", *values) for key, values in _numbers(one, other))


def _by_parameter(checkpoint: Checkpoint) -> dict[Any, Group]:
    return {name: group for each in checkpoint.optimizers for group in each.groups for name in group.parameters}


def _numbers(a: Group, b: Group) -> Iterator[tuple[str, tuple[Any, Any]]]:
    one, other = _words(a), _words(b)
    for key in {**one, **other}:
        yield key, (one.get(key), other.get(key))
    rates = _rate(a), _rate(b)
    if None not in rates:
        yield "learning rate now", rates


def _words(group: Group) -> dict[str, Any]:
    """All numbers and choices by name; those of the framework where the class is not known."""
    if group.optimizer is None:
        rate = {"lr": base_rate(group.settings)} if "lr" in group.settings else {}
        return {**group.settings, **rate}
    configured = configure(group.spec)
    return {**configured.values, **configured.options}


def _rate(group: Group) -> Any:
    rate = group.settings.get("lr") if group.rate is None else group.rate
    return rate.array().item() if isinstance(rate, Tensor) else rate


# ---- schedules and random numbers ------------------------------------------------------------------------------------


def _schedules(a: Checkpoint, b: Checkpoint) -> Iterator[Fact]:
    one, other = ([each for each in checkpoint.schedules if each.words != ()] for checkpoint in (a, b))
    for at in range(max(len(one), len(other))):
        yield _schedule(one[at] if at < len(one) else None, other[at] if at < len(other) else None)


def _schedule(a: Schedule | None, b: Schedule | None) -> Fact:
    if a is None or b is None:
        return Fact("schedule", _schedule_text(a), _schedule_text(b), False)
    known = a.words is not None and b.words is not None
    equal = same(_plain(a.words), _plain(b.words)) if known else a.words is b.words and same(a.state, b.state)
    return Fact("schedule", _schedule_text(a), _schedule_text(b), equal and a.position == b.position)


def _schedule_text(schedule: Schedule | None) -> str | None:
    if schedule is None:
        return None
    words = "of a kind that is not known" if schedule.words is None else ", then ".join(map(str, schedule.words))
    return f"{words}, after {quantity(schedule.position or 0, 'step')}"


def _plain(words: Sequence[Spec] | None) -> list[Spec]:
    """Without what says nothing."""
    return [Spec(spec.name, {k: v for k, v in spec.options.items() if v not in (None, 0)}) for spec in words or ()]


def _random_states(a: Checkpoint, b: Checkpoint) -> Iterator[Fact]:
    one, other = ({(each.kind, each.rank): each.state for each in side.randomness} for side in (a, b))
    for kind, rank in {**one, **other}:
        key = (kind, rank)
        equal = key in one and key in other and same(one[key], other[key])
        told = ("its state" if key in one else None), ("its state" if equal else "another" if key in other else None)
        where = f" of process {rank}" if rank else ""
        yield Fact(f"random numbers, {kind}{where}", *told, equal)
