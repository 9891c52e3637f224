"""Calls of a program, and loops in place of calls that repeat."""

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
    """Tensor of a program."""

    tensor: Any = None
    """Shape and type, as the framework represents them."""
    name: str = ""
    """Name of an input or a constant."""
    path: str = ""
    """Path under which the program holds the tensor."""
    array: np.ndarray | None = None
    """Elements of a constant."""
    step: ProgramStep | None = None
    """Call that computes the tensor."""


@dataclasses.dataclass(eq=False)
class ProgramStep:
    """Call whose arguments contain values in place of tensors."""

    function: str
    """`torch.relu`, `torch.Tensor.reshape`, or a call of the module: `self.dropout`."""
    arguments: list[Any]
    named: dict[str, Any] = dataclasses.field(default_factory=dict)
    results: list[Value] = dataclasses.field(default_factory=list)
    is_tuple: bool = False
    pattern: str = ""
    """Nesting of the results: `{}, ({}, {})` (default: flat)."""
    call: Callable[..., Any] | None = None
    """Function of the framework itself."""
    item: int | None = None
    """Index of the only result that is read."""
    bodies: dict[str, Body] = dataclasses.field(default_factory=dict)
    """Functions that are defined for the call, by argument."""

    def values(self) -> Iterator[Value]:
        """Yield the values that the call reads."""
        yield from values_in([self.arguments, self.named])
        for body in self.bodies.values():
            yield from body.captured()


@dataclasses.dataclass(eq=False)
class Body:
    """Calls of a nested function."""

    arguments: list[Value]
    steps: list[ProgramStep]
    outputs: list[Value]
    after: str = ""
    """Line that follows the definition; `{}` is the name of the function."""

    def captured(self) -> Iterator[Value]:
        """Return the outer values that the body reads."""
        inside = {*self.arguments, *(value for step in self.steps for value in step.results)}
        read = [*(value for step in self.steps for value in step.values()), *self.outputs]
        return (value for value in read if value not in inside)


def step_result(function: str, *arguments: Any, **named: Any) -> Value:
    """Return the result of a new call."""
    step = ProgramStep(function, list(arguments), named)
    step.results = [Value(step=step)]
    return step.results[0]


class Holder:
    """Argument that contains values, such as a formula of sizes."""

    parts: tuple[Any, ...]

    def values(self) -> Iterator[Value]:
        return values_in(list(self.parts))


def _leaves(argument: Any) -> Iterator[Any]:
    """Yield all of an argument that is not a mapping, a list or a tuple."""
    if isinstance(argument, Mapping | list | tuple):
        for item in argument.values() if isinstance(argument, Mapping) else argument:
            yield from _leaves(item)
    else:
        yield argument


def values_in(argument: Any) -> Iterator[Value]:
    for leaf in _leaves(argument):
        if isinstance(leaf, Value):
            yield leaf
        elif isinstance(leaf, Holder):
            yield from leaf.values()


def without_unused(steps: list[ProgramStep], outputs: Iterable[Value]) -> list[ProgramStep]:
    """Return the calls that an output depends on."""
    needed, used = set(outputs), []
    for step in reversed(steps):
        if not needed.isdisjoint(step.results):
            needed.update(step.values())
            used.append(step)
    return used[::-1]


def in_order(outputs: Iterable[Value]) -> list[ProgramStep]:
    """Return the calls that outputs depend on, each as late as its first reader allows."""
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
    """Replace calls with several results by calls of the only result that is read."""
    steps = list(steps)
    uses = count_uses(steps, outputs)
    for step in steps:
        read = [i for i, value in enumerate(step.results) if uses[value]]
        if step.is_tuple and len(read) == 1 and not step.pattern and not step.bodies and step.function[0] != ".":
            step.is_tuple, step.item, step.results = False, read[0], [step.results[read[0]]]


def call_key(step: ProgramStep, value_key: Callable[[Value], Any] = id) -> Any:
    """Return a key that is equal for calls that compute the same."""

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
    """Insert calls that store results, after their values and after readers of the old value."""
    ordered, stored = list(steps), set[ProgramStep]()
    for store in stores:
        needed = in_order(store.values())
        new = [*(step for step in needed if step not in set(ordered)), store]
        position = max((i for i, step in enumerate(ordered) if step in set(needed)), default=-1) + 1
        while position < len(ordered) and ordered[position] in stored:
            position += 1
        path = store.arguments[0].path
        if any(value.path == path for step in ordered[position:] for value in step.values()):
            position = len(ordered)
        ordered[position:position] = new
        stored.update(new)
    return ordered


# ---- loops -----------------------------------------------------------------------------------------------------------

_STORED_NAME = re.compile(r'\["([^"{}\\]*)"\]$')
"""Name in the expression of a stored tensor: `params["blocks.0.norm.weight"]`."""


@dataclasses.dataclass(eq=False)
class LoopStep(ProgramStep):
    """Calls repeated for several layers; `results` are the carried values after the last iteration."""

    numbers: range = range(0)
    steps: list[ProgramStep] = dataclasses.field(default_factory=list)
    inner: list[Value] = dataclasses.field(default_factory=list)
    """Carried values inside the loop, one per argument."""
    new: list[Value] = dataclasses.field(default_factory=list)
    """Carried values at the end of an iteration."""
    over: str = ""
    """List of modules, each a `block` (default: the loop is over `numbers`)."""

    def values(self) -> Iterable[Value]:  # type: ignore[override]
        inside = {*self.inner, *(value for step in self.steps for value in step.results)}
        yield from self.arguments
        yield from (value for step in self.steps for value in step.values() if value not in inside)


def fold_repeats(steps: Sequence[ProgramStep], outputs: Iterable[Value]) -> list[ProgramStep]:
    """Return the calls with repeated ones replaced by loops."""
    ordered = _with_sizes_first(steps)
    repeats = find_repeats([_item(step) for step in ordered], list(outputs))
    loops = [(repeat, _loop(ordered[repeat.start : repeat.start + repeat.length], repeat)) for repeat in repeats]
    if not any(loop for _, loop in loops):
        return list(steps)
    for repeat, loop in reversed(loops):
        if loop is not None:
            ordered[repeat.start : repeat.start + repeat.length * repeat.count] = [loop]
    return ordered


def _with_sizes_first(steps: Sequence[ProgramStep]) -> list[ProgramStep]:
    """Move sizes and constants that several calls read before the first block."""
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
    matches = [_STORED_NAME.search(value.path) for value in read]
    paths = tuple(match[1] for match in matches if match)
    inputs = tuple(v for v, match in zip(read, matches, strict=True) if not match and v.array is None)
    others = step.item, step.is_tuple, len(step.bodies) and id(step)
    return Item((call_key(step, _value_key), *others), paths, inputs, tuple(step.results))


def _value_key(value: Value) -> Any:
    """Return what values of the same role in different blocks have in common."""
    match = _STORED_NAME.search(value.path)
    array = None if value.array is None else (value.array.dtype, value.array.shape, value.array.tobytes())
    return value.path[: match.start()] if match else "", array


def _loop(steps: Sequence[ProgramStep], repeat: Repeat) -> LoopStep | None:
    old = f'"{repeat.prefix}.{repeat.first}.'
    inner = {value: Value(value.tensor, step=value.step) for value in repeat.carried}
    changed: dict[Value, Value] = dict(inner)
    for value in (value for step in steps for value in step.values()):
        if old in value.path:
            new = value.path.replace(old, f'f"{repeat.prefix}.{{i}}.')
            changed.setdefault(value, Value(value.tensor, path=new))
    leaves = (leaf for step in steps for leaf in _leaves([step.arguments, step.named]))
    if any(value in changed for leaf in leaves if isinstance(leaf, Holder) for value in leaf.values()):
        return None
    body = [
        dataclasses.replace(
            step, arguments=replace_values(step.arguments, changed), named=replace_values(step.named, changed)
        )
        for step in steps
    ]
    for value in inner.values():
        value.step = None
    loop = LoopStep("for", list(repeat.carried), numbers=range(repeat.first, repeat.first + repeat.count), steps=body)
    loop.inner, loop.new = list(inner.values()), [new for new, _ in repeat.carried.values()]
    loop.results = [last for _, last in repeat.carried.values()]
    return loop


def map_argument(argument: Any, function: Callable[[Any], Any]) -> Any:
    """Return an argument with `function` applied to all that is not a list, a tuple or a dict."""
    if isinstance(argument, dict):
        return {key: map_argument(item, function) for key, item in argument.items()}
    if isinstance(argument, list | tuple) and not hasattr(argument, "_fields"):
        items = [map_argument(item, function) for item in argument]
        return items if isinstance(argument, list) else tuple(items)
    return function(argument)


def replace_values(argument: Any, new: Mapping[Value, Value]) -> Any:
    """Return an argument with other values in it."""
    return map_argument(argument, lambda item: new.get(item, item) if isinstance(item, Value) else item)
