"""Differences between two checkpoints or training models."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from onward.agreement.tolerance import Distance, compare_elements
from onward.arguments import Range, checked
from onward.checkpoint.exporting import checkpoint_of_model, weights_of
from onward.checkpoint.format import Checkpoint
from onward.checkpoint.formats import open_either
from onward.checkpoint.name_matching import TRAINER, pair_names, with_names, with_own_names
from onward.checkpoint.pytorch.pickle_objects import Object
from onward.checkpoint.pytorch.state_dicts import base_rate
from onward.errors import UnsupportedError
from onward.inspect.formatting import quantity
from onward.model import Model
from onward.recipe.optimizers import configure
from onward.recipe.spec import Spec
from onward.run_state.state import COUNT, ParameterGroup, SchedulerState
from onward.run_state.tensors import Tensor, as_tensor, transpose

_COUNTERS = "num_batches_tracked"
_Tolerance = Annotated[float, Range(least=0)]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Tensor that two checkpoints have in common."""

    name: str
    """In the first; optimizer state is `parameter/slot`."""
    other: str
    """In the second."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    distance: Distance | None
    """None where the shapes differ."""
    is_transposed: bool = False

    @property
    def equal(self) -> bool:
        return self.distance is not None and not self.distance.differ and self.dtypes[0] == self.dtypes[1]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Result of `diff`: pairs of tensors, names of one side only, and facts about the training."""

    a: Checkpoint
    b: Checkpoint
    tensors: tuple[Pair, ...]
    """Parameters, buffers and averages."""
    slots: tuple[Pair, ...]
    """Optimizer state."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    facts: tuple[Fact, ...]
    """Classes, hyper-parameters, schedules, steps, random numbers."""
    rules: tuple[str, ...]
    """How names were matched, in text."""

    @property
    def equal(self) -> bool:
        results = [pair.equal for pair in (*self.tensors, *self.slots)] + [fact.equal for fact in self.facts]
        return not self.only_a and not self.only_b and all(results)


@checked()
def diff(
    a: Model | Checkpoint | str | os.PathLike[str],
    b: Model | Checkpoint | str | os.PathLike[str],
    *,
    atol: _Tolerance = 0.0,
    rtol: _Tolerance = 0.0,
) -> Comparison:
    """Compare two checkpoints of any formats, two models, or one of each. Nothing in them is
    executed.

        print(onward.diff("checkpoint-500", "training.onnx", rtol=1e-5))

    - `a`, `b`: paths, checkpoints or models; tensors are read one at a time
    - `atol`, `rtol`: tolerance of numbers: `atol + rtol * abs(second)`
    """
    first, second = _checkpoint(a), _checkpoint(b)
    rules: list[str] = []
    names = pair_names(first, second, rules)
    first, second = _name_slots(first, second, names, rules)
    transposed = _transposed_matrices(first, second, names)
    compare = functools.partial(_compare_tensors, atol, rtol)
    tensors = [compare(a, first.tensors[a], b, second.tensors[b], transposed.get(a)) for a, b in names.items()]
    is_transposed = {pair.name: pair.is_transposed for pair in tensors}
    slots, second_slots = [], _slots(second)
    for (name, slot), tensor in _slots(first).items():
        other = names.get(str(name), name)
        if (value := second_slots.get((other, slot))) is not None:
            is_pair_transposed = is_transposed.get(str(name), False)
            slots.append(compare(f"{name}/{slot}", tensor, f"{other}/{slot}", value, is_pair_transposed))
    for name, tensor in first.averages.items():
        other = names.get(name, name)
        if (value := second.averages.get(other)) is not None:
            is_pair_transposed = is_transposed.get(name, False)
            tensors.append(compare(_average(name), tensor, _average(other), value, is_pair_transposed))
    only_a, only_b = _only(first, second, [*tensors, *slots])
    all_facts = tuple(facts(first, second, names))
    return Comparison(first, second, tuple(tensors), tuple(slots), only_a, only_b, all_facts, tuple(rules))


def _checkpoint(source: Model | Checkpoint | str | os.PathLike[str]) -> Checkpoint:
    model = open_either(source)
    if isinstance(model, Checkpoint):
        return model
    if not model.steps:
        return weights_of(model)
    checkpoint = checkpoint_of_model(model)
    title = checkpoint.title if checkpoint.format == "onnx" else f"ONNX training model, made of: {checkpoint.title}"
    return dataclasses.replace(checkpoint, path=model.path or checkpoint.path, title=title)


def _name_slots(
    a: Checkpoint, b: Checkpoint, names: Mapping[str, str], rules: list[str]
) -> tuple[Checkpoint, Checkpoint]:
    """Return both with names for their optimizer state, if one of them has names."""
    with contextlib.suppress(UnsupportedError):
        a = with_own_names(a)
    with contextlib.suppress(UnsupportedError):
        b = with_own_names(b)
    if not a.has_names and b.has_names:
        a = _with_names_of_other(a, b, {other: name for name, other in names.items()}, rules)
    elif not b.has_names and a.has_names:
        b = _with_names_of_other(b, a, names, rules)
    return a, b


def _with_names_of_other(
    checkpoint: Checkpoint, other: Checkpoint, names: Mapping[str, str], rules: list[str]
) -> Checkpoint:
    groups = [[names.get(str(name), str(name)) for name in group.parameters] for group in other.stored_groups]
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    orders = {"the groups of the other": groups, "the order of the other": [[*itertools.chain(*groups)]]}
    in_trainer = checkpoint.format == TRAINER
    try:
        renamed = [with_names(item, orders, shapes, in_trainer=in_trainer) for item in checkpoint.optimizers]
    except UnsupportedError as error:
        rules.append(f"{checkpoint.path}: {error.message}")
        return checkpoint
    rules.extend(rule for _, rule in renamed if rule)
    return dataclasses.replace(checkpoint, optimizers=tuple(optimizer for optimizer, _ in renamed))


def _slots(checkpoint: Checkpoint) -> dict[tuple[str | int, str], Tensor]:
    """Return optimizer state without counts of updates, whose types differ among formats."""
    return {
        (name, slot): as_tensor(value)
        for name, slot, value in checkpoint.stored_slots
        if slot != COUNT and value is not None
    }


def _average(name: str) -> str:
    return f"the average of {name}"


def _only(a: Checkpoint, b: Checkpoint, pairs: list[Pair]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names that only one of the two has. A training model does not count batches."""
    seen = ({pair.name for pair in pairs}, {pair.other for pair in pairs})
    counts = all(checkpoint.format != "onnx" for checkpoint in (a, b))

    def alone(checkpoint: Checkpoint, paired: set[str]) -> Iterator[str]:
        slots = (f"{name}/{slot}" for name, slot in _slots(checkpoint))
        for name in (*checkpoint.tensors, *map(_average, checkpoint.averages), *slots):
            if name not in paired and (counts or not name.endswith(_COUNTERS)):
                yield name

    return tuple(alone(a, seen[0])), tuple(alone(b, seen[1]))


def _transposed_matrices(a: Checkpoint, b: Checkpoint, names: Mapping[str, str]) -> dict[str, bool | None]:
    """Return whether each matrix is transposed in the second; None if only its elements tell."""
    shapes = {name: (a.tensors[name].shape, b.tensors[other_name].shape) for name, other_name in names.items()}
    transposed: dict[str, bool | None] = {
        name: shape != other_shape and shape == other_shape[::-1]
        for name, (shape, other_shape) in shapes.items()
        if len(shape) == 2
    }
    if any(transposed.values()):
        transposed |= {name: None for name in transposed if shapes[name][0][0] == shapes[name][0][1]}
    return transposed


def _compare_tensors(
    atol: float, rtol: float, name: str, a: Tensor, other: str, b: Tensor, is_transposed: bool | None
) -> Pair:
    """Compare two tensors. If `is_transposed` is None, take the orientation that is nearer."""
    b = transpose(b) if is_transposed and len(b.shape) == 2 else b
    distance = None
    if a.shape == b.shape:
        distance = compare_elements(a.array(), b.array(), atol, rtol)
        if is_transposed is None and distance.differ:
            transposed_distance = compare_elements(a.array(), b.array().T, atol, rtol)
            if transposed_distance.differ < distance.differ:
                distance, is_transposed = transposed_distance, True
    return Pair(name, other, (a.shape, b.shape), (str(a.dtype), str(b.dtype)), distance, bool(is_transposed))


# ---- facts about the training ----------------------------------------------------------------------------------------


_RELATIVE_TOLERANCE = 1e-6
"""Relative tolerance: a training model stores most numbers in float32."""


class Fact(NamedTuple):
    """Property of the training, such as the step or a hyper-parameter."""

    name: str
    a: Any
    """Text or number; None if it is unknown."""
    b: Any
    equal: bool


def facts(a: Checkpoint, b: Checkpoint, names: Mapping[str, str]) -> Iterator[Fact]:
    """Return facts about the training. `names` are names of the first -> names of the second."""
    yield _fact("step", a.step, b.step)
    yield _fact("optimizer", *("; ".join(optimizer.title for optimizer in side.optimizers) or None for side in (a, b)))
    yield from _groups(a, b, names)
    yield from _schedules(a, b)
    yield _fact("clipping", dict(a.clip or {}), dict(b.clip or {}))
    yield _fact("batches for an update", a.accumulate or 1, b.accumulate or 1)
    if a.scaler or b.scaler:
        yield _fact("scale of the loss", dict(a.scaler), dict(b.scaler))
    yield from _random_states(a, b)


def _fact(name: str, a: Any, b: Any) -> Fact:
    first, second = (None if isinstance(value, Mapping) and not value else value for value in (a, b))
    return Fact(name, first, second, same(a, b))


def same(a: Any, b: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """True if two trees are equal: numbers to the precision of float32, tensors exactly.

    `seen` holds pairs that are or were compared: a tree may hold a part many times, and itself.
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
        if not (isinstance(a, int | float) and isinstance(b, int | float)):
            return False
        is_close = math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE, abs_tol=1e-30)
        return is_close or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def _same_arrays(a: Any, b: Any) -> bool:
    first, second = (value.array() if isinstance(value, Tensor) else value for value in (a, b))
    if not (isinstance(first, np.ndarray) and isinstance(second, np.ndarray)):
        return False
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return bool(np.array_equal(first, second)) if first.dtype.hasobject else first.tobytes() == second.tobytes()


def _groups(a: Checkpoint, b: Checkpoint, names: Mapping[str, str]) -> Iterator[Fact]:
    """Return hyper-parameters, compared for parameters that two groups have in common."""
    other_groups = _by_parameter(b)
    both: dict[tuple[int, int], tuple[ParameterGroup, ParameterGroup, list[Any]]] = {}
    for name, group in _by_parameter(a).items():
        if (second := other_groups.get(names.get(str(name), name))) is not None:
            both.setdefault((id(group), id(second)), (group, second, []))[2].append(name)
    for first, second, parameters in both.values():
        suffix = "" if len(both) == 1 else f" of {len(parameters)} parameters, {parameters[0]} first"
        words, other_words = _words(first), _words(second)
        for key in {**words, **other_words}:
            yield _fact(f"{key}{suffix}", words.get(key), other_words.get(key))
        rates = _rate(first), _rate(second)
        if None not in rates:
            yield _fact(f"learning rate now{suffix}", *rates)


def _by_parameter(checkpoint: Checkpoint) -> dict[Any, ParameterGroup]:
    return {name: group for group in checkpoint.stored_groups for name in group.parameters}


def _words(group: ParameterGroup) -> dict[str, Any]:
    """Return all numbers and choices by name; the framework's settings if the class is unknown."""
    if group.optimizer is None:
        rate = {"lr": base_rate(group.settings)} if "lr" in group.settings else {}
        return {**group.settings, **rate}
    configured = configure(group.spec)
    return {**configured.values, **configured.options}


def _rate(group: ParameterGroup) -> Any:
    rate = group.settings.get("lr") if group.rate is None else group.rate
    return rate.array().item() if isinstance(rate, Tensor) else rate


def _schedules(a: Checkpoint, b: Checkpoint) -> Iterator[Fact]:
    first, second = ([schedule for schedule in checkpoint.schedules if schedule.words != ()] for checkpoint in (a, b))
    for schedule, other in itertools.zip_longest(first, second):
        equal = bool(schedule and other) and schedule.position == other.position
        if equal and schedule.words is not None and other.words is not None:
            equal = same(_plain(schedule.words), _plain(other.words))
        elif equal:
            equal = schedule.words is other.words and same(schedule.state, other.state)
        yield Fact("schedule", _schedule_text(schedule), _schedule_text(other), equal)


def _schedule_text(schedule: SchedulerState | None) -> str | None:
    if schedule is None:
        return None
    words = "of an unknown kind" if schedule.words is None else ", then ".join(map(str, schedule.words))
    return f"{words}, after {quantity(schedule.position or 0, 'step')}"


def _plain(words: Sequence[Spec]) -> list[Spec]:
    """Return schedules without options that have no effect."""
    return [Spec(spec.name, {k: v for k, v in spec.options.items() if v not in (None, 0)}) for spec in words]


def _random_states(a: Checkpoint, b: Checkpoint) -> Iterator[Fact]:
    first, second = ({(item.kind, item.rank): item.state for item in side.randomness} for side in (a, b))
    for key in {**first, **second}:
        generator, rank = key
        equal = key in first and key in second and same(first[key], second[key])
        state = "its state" if key in first else None
        other_state = "its state" if equal else "another" if key in second else None
        suffix = f" of process {rank}" if rank else ""
        yield Fact(f"random numbers, {generator}{suffix}", state, other_state, equal)
