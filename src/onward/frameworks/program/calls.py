"""Programs as calls: values, steps, and loops in place of steps that repeat."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onward.analysis.repeats import Item, Repeat, find_repeats


@dataclasses.dataclass(eq=False)
class Value:
    """A tensor of a program."""

    tensor: Any = None
    """Its shape and type, as the framework has them."""
    name: str = ""
    """Of an input; of a constant, if it has one."""
    path: str = ""
    """Where the program holds it, if it does."""
    array: np.ndarray | None = None
    """What it is, if it is a constant."""
    step: ProgramStep | None = None
    """What computes it, if something does."""


@dataclasses.dataclass(eq=False)
class ProgramStep:
    """One call; in its arguments are values where there were tensors."""

    function: str
    """`torch.relu`, `torch.Tensor.reshape`, or what the module calls: `self.dropout`."""
    arguments: list[Any]
    named: dict[str, Any] = dataclasses.field(default_factory=dict)
    results: list[Value] = dataclasses.field(default_factory=list)
    is_tuple: bool = False
    pattern: str = ""
    """How the results lie in one another, if not side by side: `{}, ({}, {})`."""
    call: Callable[..., Any] | None = None
    """The function itself, if it is one of the framework's own."""
    item: int | None = None
    """Which of several results is taken, if only one is."""
    bodies: dict[str, Body] = dataclasses.field(default_factory=dict)
    """Functions that are defined for the call, by the names of its arguments."""

    def values(self) -> Iterator[Value]:
        """What it reads."""
        yield from values_in([self.arguments, self.named])
        for body in self.bodies.values():
            yield from body.captured()


@dataclasses.dataclass(eq=False)
class Body:
    """Calls that depend on arguments of their own."""

    arguments: list[Value]
    steps: list[ProgramStep]
    outputs: list[Value]
    after: str = ""
    """A line that follows the definition, in which `{}` is the name of the function."""

    def captured(self) -> Iterator[Value]:
        """What is read from around it."""
        inside = {*self.arguments, *(value for step in self.steps for value in step.results)}
        read = [*(value for step in self.steps for value in step.values()), *self.outputs]
        return (value for value in read if value not in inside)


def step_result(function: str, *arguments: Any, **named: Any) -> Value:
    """The result of a new call."""
    step = ProgramStep(function, list(arguments), named)
    step.results = [Value(step=step)]
    return step.results[0]


class Holder:
    """An argument that mentions values, as a formula of their sizes does."""

    parts: tuple[Any, ...]

    def values(self) -> Iterator[Value]:
        return values_in(list(self.parts))


def values_in(argument: Any) -> Iterator[Value]:
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, Holder):
        yield from argument.values()
    elif isinstance(argument, Mapping):
        yield from values_in(list(argument.values()))
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from values_in(item)


def without_unused(steps: list[ProgramStep], outputs: Iterable[Value]) -> list[ProgramStep]:
    """Only those steps that an output depends on."""
    needed, kept = set(outputs), []
    for step in reversed(steps):
        if not needed.isdisjoint(step.results):
            needed.update(step.values())
            kept.append(step)
    return kept[::-1]


def in_order(outputs: Iterable[Value]) -> list[ProgramStep]:
    """What outputs depend on, each call as near before its first reader as may be."""
    order: dict[ProgramStep, None] = {}
    pending: list[tuple[ProgramStep, bool]] = [(v.step, False) for v in reversed(list(outputs)) if v.step]
    while pending:
        step, is_ready = pending.pop()
        if is_ready:
            order.setdefault(step)
        elif step not in order:
            pending.append((step, True))
            pending += [(v.step, False) for v in reversed(list(step.values())) if v.step is not None]
    return list(order)


def count_uses(steps: Iterable[ProgramStep], outputs: Iterable[Value]) -> collections.Counter[Value]:
    return collections.Counter([*(value for step in steps for value in step.values()), *outputs])


def take_single_results(steps: Iterable[ProgramStep], outputs: Iterable[Value]) -> None:
    """Where only one of several results is read, let the call be of that one."""
    steps = list(steps)
    uses = count_uses(steps, outputs)
    for step in steps:
        read = [i for i, value in enumerate(step.results) if uses[value]]
        if step.is_tuple and len(read) == 1 and not step.pattern and not step.bodies and step.function[0] != ".":
            step.is_tuple, step.item, step.results = False, read[0], [step.results[read[0]]]


def call_key(step: ProgramStep, value_key: Callable[[Value], Any] = id) -> Any:
    """What tells a call from others: equal ones compute the same."""

    def key(argument: Any) -> Any:
        if isinstance(argument, Value):
            return value_key(argument)
        if isinstance(argument, Mapping):
            return tuple((name, key(item)) for name, item in argument.items())
        if type(argument) in (list, tuple):
            return (type(argument).__name__, *map(key, argument))
        if isinstance(argument, Holder):
            return key(list(argument.parts))
        if isinstance(argument, slice):
            return key(["slice", argument.start, argument.stop, argument.step])
        return f"{type(argument).__name__} {argument!r}"

    return key([step.function, step.arguments, step.named])


def with_stores(steps: list[ProgramStep], stores: Iterable[ProgramStep]) -> list[ProgramStep]:
    """Calls with those that only keep what others have computed, each as soon as that is there, and nobody reads
    what was there before.
    """
    made, added = list(steps), set[ProgramStep]()
    for store in stores:
        needed = in_order(store.values())
        new = [*(step for step in needed if step not in set(made)), store]
        after = max((i for i, step in enumerate(made) if step in set(needed)), default=-1) + 1
        while after < len(made) and made[after] in added:
            after += 1
        path = store.arguments[0].path
        if any(value.path == path for step in made[after:] for value in step.values()):
            after = len(made)
        made[after:after] = new
        added.update(new)
    return made


# ---- loops -----------------------------------------------------------------------------------------------------------

_HELD = re.compile(r'\["([^"{}\\]*)"\]$')
"""The name of what is held, in the expression that reaches it: `params["blocks.0.norm.weight"]`."""


@dataclasses.dataclass(eq=False)
class Loop(ProgramStep):
    """Steps for each of several layers; `results` are what is carried after the last."""

    numbers: range = range(0)
    steps: list[ProgramStep] = dataclasses.field(default_factory=list)
    inner: list[Value] = dataclasses.field(default_factory=list)
    """What is carried within the loop, for each of the arguments."""
    new: list[Value] = dataclasses.field(default_factory=list)
    """What it becomes."""

    def values(self) -> Iterable[Value]:  # type: ignore[override]
        inside = {*self.inner, *(value for step in self.steps for value in step.results)}
        yield from self.arguments
        yield from (value for step in self.steps for value in step.values() if value not in inside)


def fold_repeats(steps: Sequence[ProgramStep], outputs: Iterable[Value]) -> list[ProgramStep]:
    """The same calls, with a loop in place of those that are repeated."""
    made = _with_sizes_first(steps)
    found = find_repeats([_item(step) for step in made], list(outputs))
    loops = [(repeat, _loop(made[repeat.start : repeat.start + repeat.length], repeat)) for repeat in found]
    if not any(loop for _, loop in loops):
        return list(steps)
    for repeat, loop in reversed(loops):
        if loop is not None:
            made[repeat.start : repeat.start + repeat.length * repeat.count] = [loop]
    return made


def _with_sizes_first(steps: Sequence[ProgramStep]) -> list[ProgramStep]:
    """Sizes and constants that several calls read come before all of them, and not with the first block."""
    uses = count_uses(steps, [])
    sizes: set[ProgramStep] = set()
    for step in steps:
        read = [value for value in step.values() if value.array is None]
        if step.function in _SHAPES or (step.results and all(value.step in sizes for value in read)):
            sizes.add(step)
    shared = [step for step in sizes if any(uses[value] > 1 for value in step.results)]
    early = set(in_order([value for step in shared for value in step.results]))
    return [*(step for step in steps if step in early), *(step for step in steps if step not in early)]


_SHAPES = (".shape", "ops.shape")


def _item(step: ProgramStep) -> Item:
    read = list(step.values())
    held = [_HELD.search(value.path) for value in read]
    paths = tuple(found[1] for found in held if found)
    inputs = tuple(v for v, found in zip(read, held, strict=True) if not found and v.array is None)
    others = step.item, step.is_tuple, len(step.bodies) and id(step)
    return Item((call_key(step, _kind), *others), paths, inputs, tuple(step.results))


def _kind(value: Value) -> Any:
    """What is the same of values in different blocks."""
    found = _HELD.search(value.path)
    array = None if value.array is None else (value.array.dtype, value.array.shape, value.array.tobytes())
    return value.path[: found.start()] if found else "", array


def _loop(steps: Sequence[ProgramStep], repeat: Repeat) -> Loop | None:
    old = f'"{repeat.prefix}.{repeat.first}.'
    inner = {value: Value(value.tensor, step=value.step) for value in repeat.carried}
    changed: dict[Value, Value] = dict(inner)
    for value in (value for step in steps for value in step.values()):
        if old in value.path:
            new = value.path.replace(old, f'f"{repeat.prefix}.{{i}}.')
            changed.setdefault(value, Value(value.tensor, path=new))
    sizes = [part for step in steps for part in _holders([step.arguments, step.named])]
    if any(value in changed for part in sizes for value in part.values()):
        return None
    body = []
    for step in steps:
        copy = dataclasses.replace(step, arguments=_replace_values(step.arguments, changed))
        copy.named = _replace_values(step.named, changed)
        body.append(copy)
    for value in inner.values():
        value.step = None
    loop = Loop("for", list(repeat.carried), numbers=range(repeat.first, repeat.first + repeat.count), steps=body)
    loop.inner, loop.new = list(inner.values()), [new for new, _ in repeat.carried.values()]
    loop.results = [last for _, last in repeat.carried.values()]
    return loop


def _holders(argument: Any) -> list[Holder]:
    if isinstance(argument, Holder):
        return [argument]
    items = argument.values() if isinstance(argument, dict) else argument if isinstance(argument, list | tuple) else ()
    return [holder for item in items for holder in _holders(item)]


def _replace_values(argument: Any, new: dict[Value, Value]) -> Any:
    """An argument with other values in it."""
    if isinstance(argument, Value):
        return new.get(argument, argument)
    if isinstance(argument, dict):
        return {key: _replace_values(item, new) for key, item in argument.items()}
    if type(argument) in (list, tuple):
        return type(argument)(_replace_values(item, new) for item in argument)
    return argument
