"""Calls that a model repeats, layer by layer, as a loop over these layers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from onward.analysis.repeats import Item, Repeat, find_repeats
from onward.frameworks.program.calls import Holder, Step, Value, call_key, count_uses, in_order

_HELD = re.compile(r'\["([^"{}\\]*)"\]$')
"""The name of what is held, in the expression that reaches it: `params["blocks.0.norm.weight"]`."""


@dataclasses.dataclass(eq=False)
class Loop(Step):
    """Steps for each of several layers; `results` are what is carried after the last."""

    numbers: range = range(0)
    steps: list[Step] = dataclasses.field(default_factory=list)
    inner: list[Value] = dataclasses.field(default_factory=list)
    """What is carried within the loop, for each of the arguments."""
    new: list[Value] = dataclasses.field(default_factory=list)
    """What it becomes."""

    def values(self) -> Iterable[Value]:  # type: ignore[override]
        inside = {*self.inner, *(value for step in self.steps for value in step.results)}
        yield from self.arguments
        yield from (value for step in self.steps for value in step.values() if value not in inside)


def fold_repeats(steps: Sequence[Step], outputs: Iterable[Value]) -> list[Step]:
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


def _with_sizes_first(steps: Sequence[Step]) -> list[Step]:
    """Sizes and constants that several calls read come before all of them, and not with the first block."""
    uses = count_uses(steps, [])
    sizes: set[Step] = set()
    for step in steps:
        read = [value for value in step.values() if value.array is None]
        if step.function in _SHAPES or (step.results and all(value.step in sizes for value in read)):
            sizes.add(step)
    shared = [step for step in sizes if any(uses[value] > 1 for value in step.results)]
    early = set(in_order([value for step in shared for value in step.results]))
    return [*(step for step in steps if step in early), *(step for step in steps if step not in early)]


_SHAPES = (".shape", "ops.shape")


def _item(step: Step) -> Item:
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


def _loop(steps: Sequence[Step], repeat: Repeat) -> Loop | None:
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
