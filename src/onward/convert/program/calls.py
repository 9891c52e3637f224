"""What a program does, as calls one after another: each framework records them, and statements are made of them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np


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
    step: Step | None = None
    """What computes it, if something does."""


@dataclasses.dataclass(eq=False)
class Step:
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

    def values(self) -> Iterator[Value]:
        """What it reads."""
        return values_in([self.arguments, self.named])


class Holder:
    """An argument that mentions values, as a formula of their sizes does."""

    def values(self) -> Iterable[Value]:
        raise NotImplementedError


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


def without_unused(steps: list[Step], outputs: Iterable[Value]) -> list[Step]:
    """Only those steps that an output depends on."""
    needed, kept = set(outputs), []
    for step in reversed(steps):
        if not needed.isdisjoint(step.results):
            needed.update(step.values())
            kept.append(step)
    return kept[::-1]


def in_order(outputs: Iterable[Value]) -> list[Step]:
    """What outputs depend on, each call as near before its first reader as may be."""
    order: dict[Step, None] = {}
    pending: list[tuple[Step, bool]] = [(v.step, False) for v in reversed(list(outputs)) if v.step]
    while pending:
        step, is_ready = pending.pop()
        if is_ready:
            order.setdefault(step)
        elif step not in order:
            pending.append((step, True))
            pending += [(v.step, False) for v in reversed(list(step.values())) if v.step is not None]
    return list(order)


def count_uses(steps: Iterable[Step], outputs: Iterable[Value]) -> collections.Counter[Value]:
    return collections.Counter([*(value for step in steps for value in step.values()), *outputs])
