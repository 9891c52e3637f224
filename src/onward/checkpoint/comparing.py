"""Two checkpoints, two training models, or one of each, compared: names, shapes, values, and how they go on."""

from __future__ import annotations

import dataclasses
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
from onward.checkpoint.matching import TRAINER, by_name, with_names, with_own_names
from onward.checkpoint.pytorch.pickling import Object
from onward.checkpoint.pytorch.states import base_rate
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
    """A tensor that both have."""

    name: str
    """In the first; what an optimizer keeps is `parameter/slot`."""
    other: str
    """In the second."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    distance: Distance | None
    """None where the shapes differ."""
    is_turned: bool = False
    """Whether the second has its axes in the other order."""

    @property
    def equal(self) -> bool:
        return self.distance is not None and not self.distance.differ and self.dtypes[0] == self.dtypes[1]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What two have in common, and what not."""

    a: Checkpoint
    b: Checkpoint
    tensors: tuple[Pair, ...]
    """Parameters, buffers and averages."""
    slots: tuple[Pair, ...]
    """What optimizers keep."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    facts: tuple[Fact, ...]
    """Classes, hyper-parameters, schedules, steps, random numbers."""
    rules: tuple[str, ...]
    """How names were matched, in words."""

    @property
    def equal(self) -> bool:
        found = [part.equal for part in (*self.tensors, *self.slots)] + [fact.equal for fact in self.facts]
        return not self.only_a and not self.only_b and all(found)


@checked()
def diff(
    a: Model | Checkpoint | str | os.PathLike[str],
    b: Model | Checkpoint | str | os.PathLike[str],
    *,
    atol: _Tolerance = 0.0,
    rtol: _Tolerance = 0.0,
) -> Comparison:
    """Compare two checkpoints of any formats, two models, or one of each. Nothing in them is executed.

        print(onward.diff("checkpoint-500", "training.onnx", rtol=1e-5))

    - `a`, `b`: what is compared; tensors are read one after the other
    - `atol`, `rtol`: numbers count as different beyond `atol`, and `rtol` times the second
    """
    one, other = _describe(a), _describe(b)
    rules: list[str] = []
    names = _pair_names(one, other, rules)
    one, other = _name_slots(one, other, names, rules)
    tensors, slots = [], []
    flipped = _transposed_matrices(one, other, names)
    compare = _Comparing(atol, rtol)
    for name, theirs in names.items():
        tensors.append(compare(name, one.tensors[name], theirs, other.tensors[theirs], flipped.get(name)))
    is_turned = {pair.name: pair.is_turned for pair in tensors}
    ours, others = _slots(one), _slots(other)
    for (parameter, slot), tensor in ours.items():
        key = (names.get(str(parameter), parameter), slot)
        if key in others:
            turn = is_turned.get(str(parameter), False)
            slots.append(compare(f"{parameter}/{slot}", tensor, f"{key[0]}/{slot}", others[key], turn))
    for name, tensor in one.averages.items():
        if (theirs := names.get(name, name)) in other.averages:
            turn = is_turned.get(name, False)
            tensors.append(compare(_average(name), tensor, _average(theirs), other.averages[theirs], turn))
    only_a, only_b = _only(one, other, [*tensors, *slots])
    return Comparison(
        one, other, tuple(tensors), tuple(slots), only_a, only_b, tuple(facts(one, other, names)), tuple(rules)
    )


def _describe(source: Model | Checkpoint | str | os.PathLike[str]) -> Checkpoint:
    model = open_either(source)
    if isinstance(model, Checkpoint):
        return model
    if not model.steps:
        return weights_of(model)
    found = checkpoint_of_model(model)
    title = found.title if found.format == "onnx" else f"ONNX training model, made of: {found.title}"
    return dataclasses.replace(found, path=model.path or found.path, title=title)


# ---- names -----------------------------------------------------------------------------------------------------------


def _pair_names(a: Checkpoint, b: Checkpoint, rules: list[str]) -> dict[str, str]:
    """Names of the first, and what they are called in the second."""
    names = by_name(list(a.tensors), set(b.tensors), set(b.tensors), rules)
    taken = {*names.values()}
    for alias, name in (*a.tied.items(), *((name, alias) for alias, name in b.tied.items())):
        if name in a.tensors and name not in names and alias in b.tensors and alias not in taken:
            names[name] = alias
            taken.add(alias)
            rules.append(f"`{name}` is `{alias}` there: they are tied")
    return {name: names[name] for name in a.tensors if name in names}


def _name_slots(
    a: Checkpoint, b: Checkpoint, names: Mapping[str, str], rules: list[str]
) -> tuple[Checkpoint, Checkpoint]:
    """Both with names for what their optimizers keep, where one has them or its tensors are in their order."""
    a, b = _by_itself(a), _by_itself(b)
    back = {theirs: name for name, theirs in names.items()}
    if not _has_names(a) and _has_names(b):
        a = _by_the_other(a, [[back.get(name, name) for name in group] for group in _parameter_lists(b)], rules)
    elif not _has_names(b) and _has_names(a):
        b = _by_the_other(b, [[names.get(name, name) for name in group] for group in _parameter_lists(a)], rules)
    return a, b


def _by_itself(checkpoint: Checkpoint) -> Checkpoint:
    try:
        return with_own_names(checkpoint)
    except UnsupportedError:
        return checkpoint


def _by_the_other(checkpoint: Checkpoint, groups: list[list[str]], rules: list[str]) -> Checkpoint:
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    order = [name for group in groups for name in group]
    orders = {"the groups of the other": groups, "the order of the other": [order]}
    try:
        named = [
            with_names(each, orders, shapes, in_trainer=checkpoint.format == TRAINER) for each in checkpoint.optimizers
        ]
    except UnsupportedError as error:
        rules.append(f"{checkpoint.path}: {error.message}")
        return checkpoint
    rules.extend(how for _, how in named if how)
    return dataclasses.replace(checkpoint, optimizers=tuple(optimizer for optimizer, _ in named))


def _has_names(checkpoint: Checkpoint) -> bool:
    return all(optimizer.has_names for optimizer in checkpoint.optimizers)


def _parameter_lists(checkpoint: Checkpoint) -> list[list[str]]:
    return [[str(name) for name in group.parameters] for each in checkpoint.optimizers for group in each.groups]


def _slots(checkpoint: Checkpoint) -> dict[tuple[str | int, str], Tensor]:
    """What optimizers keep, but for counts, which formats have in many types."""
    return {
        (name, slot): as_tensor(value)
        for optimizer in checkpoint.optimizers
        for name, kept in optimizer.slots.items()
        for slot, value in kept.items()
        if slot != COUNT and value is not None
    }


def _average(name: str) -> str:
    return f"the average of {name}"


def _only(a: Checkpoint, b: Checkpoint, pairs: list[Pair]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What one of the two has alone. A training model does not count batches."""
    seen = ({pair.name for pair in pairs}, {pair.other for pair in pairs})
    counts = all(each.format != "onnx" for each in (a, b))

    def alone(checkpoint: Checkpoint, known: set[str]) -> Iterator[str]:
        slots = (f"{name}/{slot}" for name, slot in _slots(checkpoint))
        for name in (*checkpoint.tensors, *map(_average, checkpoint.averages), *slots):
            if name not in known and (counts or not name.endswith(_COUNTERS)):
                yield name

    return tuple(alone(a, seen[0])), tuple(alone(b, seen[1]))


# ---- values ----------------------------------------------------------------------------------------------------------


def _transposed_matrices(a: Checkpoint, b: Checkpoint, names: Mapping[str, str]) -> dict[str, bool | None]:
    """Whether matrices have their axes in the other order; None where only their elements can tell."""
    shapes = {name: (a.tensors[name].shape, b.tensors[theirs].shape) for name, theirs in names.items()}
    found: dict[str, bool | None] = {
        name: one != other and one == other[::-1] for name, (one, other) in shapes.items() if len(one) == 2
    }
    if any(found.values()):
        found |= {name: None for name in found if shapes[name][0][0] == shapes[name][0][1]}
    return found


@dataclasses.dataclass(frozen=True)
class _Comparing:
    atol: float
    rtol: float

    def __call__(self, name: str, a: Tensor, other: str, b: Tensor, is_turned: bool | None) -> Pair:
        """Compare two tensors; where it is not known whether the second is turned, it is if it is nearer so."""
        b = transpose(b) if is_turned and len(b.shape) == 2 else b
        shapes, dtypes = (a.shape, b.shape), (str(a.dtype), str(b.dtype))
        if a.shape != b.shape:
            return Pair(name, other, shapes, dtypes, None, bool(is_turned))
        array, theirs = a.array(), b.array()
        found = compare_elements(array, theirs, self.atol, self.rtol)
        if is_turned is None and found.differ:
            again = compare_elements(array, theirs.T, self.atol, self.rtol)
            if again.differ < found.differ:
                return Pair(name, other, shapes, dtypes, again, is_turned=True)
        return Pair(name, other, shapes, dtypes, found, bool(is_turned))


# ---- facts about the training ----------------------------------------------------------------------------------------


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
    yield _fact("optimizer", *("; ".join(each.title for each in side.optimizers) or None for side in (a, b)))
    yield from _groups(a, b, names)
    yield from _schedules(a, b)
    yield _fact("clipping", dict(a.clip or {}), dict(b.clip or {}))
    yield _fact("batches for an update", a.accumulate or 1, b.accumulate or 1)
    if a.scaler or b.scaler:
        yield _fact("scale of the loss", dict(a.scaler), dict(b.scaler))
    yield from _random_states(a, b)


def _fact(name: str, a: Any, b: Any) -> Fact:
    one, other = (None if isinstance(value, Mapping) and not value else value for value in (a, b))
    return Fact(name, one, other, same(a, b))


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
        if not (isinstance(a, int | float) and isinstance(b, int | float)):
            return False
        is_close = math.isclose(a, b, rel_tol=_ONE_PART_IN, abs_tol=1e-30)
        return is_close or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def _same_arrays(a: Any, b: Any) -> bool:
    one, other = (value.array() if isinstance(value, Tensor) else value for value in (a, b))
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return False
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return bool(np.array_equal(one, other)) if one.dtype.hasobject else one.tobytes() == other.tobytes()


# ---- optimizers ------------------------------------------------------------------------------------------------------


def _groups(a: Checkpoint, b: Checkpoint, names: Mapping[str, str]) -> Iterator[Fact]:
    """Hyper-parameters, compared for parameters that two groups have in common."""
    theirs = _by_parameter(b)
    both: dict[tuple[int, int], tuple[ParameterGroup, ParameterGroup, list[Any]]] = {}
    for name, group in _by_parameter(a).items():
        if (other := theirs.get(names.get(str(name), name))) is not None:
            both.setdefault((id(group), id(other)), (group, other, []))[2].append(name)
    for one, other, parameters in both.values():
        where = "" if len(both) == 1 else f" of {len(parameters)} parameters, {parameters[0]} first"
        words, others = _words(one), _words(other)
        yield from (_fact(f"{key}{where}", words.get(key), others.get(key)) for key in {**words, **others})
        rates = _rate(one), _rate(other)
        if None not in rates:
            yield _fact(f"learning rate now{where}", *rates)


def _by_parameter(checkpoint: Checkpoint) -> dict[Any, ParameterGroup]:
    return {name: group for each in checkpoint.optimizers for group in each.groups for name in group.parameters}


def _words(group: ParameterGroup) -> dict[str, Any]:
    """All numbers and choices by name; those of the framework where the class is not known."""
    if group.optimizer is None:
        rate = {"lr": base_rate(group.settings)} if "lr" in group.settings else {}
        return {**group.settings, **rate}
    configured = configure(group.spec)
    return {**configured.values, **configured.options}


def _rate(group: ParameterGroup) -> Any:
    rate = group.settings.get("lr") if group.rate is None else group.rate
    return rate.array().item() if isinstance(rate, Tensor) else rate


# ---- schedules and random numbers ------------------------------------------------------------------------------------


def _schedules(a: Checkpoint, b: Checkpoint) -> Iterator[Fact]:
    one, other = ([each for each in checkpoint.schedules if each.words != ()] for checkpoint in (a, b))
    for at in range(max(len(one), len(other))):
        yield _schedule(one[at] if at < len(one) else None, other[at] if at < len(other) else None)


def _schedule(a: SchedulerState | None, b: SchedulerState | None) -> Fact:
    if a is None or b is None:
        return Fact("schedule", _schedule_text(a), _schedule_text(b), False)
    known = a.words is not None and b.words is not None
    equal = same(_plain(a.words), _plain(b.words)) if known else a.words is b.words and same(a.state, b.state)
    return Fact("schedule", _schedule_text(a), _schedule_text(b), equal and a.position == b.position)


def _schedule_text(schedule: SchedulerState | None) -> str | None:
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
