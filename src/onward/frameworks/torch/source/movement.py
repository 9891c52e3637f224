"""Chains of calls that only move elements, as the one call that they amount to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from onward.frameworks.program.calls import Step, Value
from onward.frameworks.torch.source.program import compute, hint, numbered_tensor

_MOVES = {
    f"torch.Tensor.{name}": getattr(torch.Tensor, name)
    for name in ("reshape", "permute", "unsqueeze", "squeeze", "flatten", "transpose", "unflatten")
}


def simplify(steps: list[Step], outputs: list[Value]) -> list[Step]:
    """The same program, in which no call is undone by a later one."""
    readers: dict[Value, list[Step]] = {}
    for step in steps:
        for value in step.values():
            readers.setdefault(value, []).append(step)
    done: set[Step] = set()
    for step in steps:
        if step.function in _MOVES and step not in done:
            chain = list(_chain(step, readers, set(outputs)))
            done.update(chain)
            _shorten(chain)
    return steps


def _chain(step: Step, readers: dict[Value, list[Step]], kept: set[Value]) -> Iterator[Step]:
    """A call that moves elements, and those that follow with nobody else looking on."""
    while True:
        yield step
        result = step.results[0]
        following = readers.get(result, [])
        if len(following) != 1 or following[0].function not in _MOVES or result in kept:
            return
        step = following[0]


Call = tuple[str, list[Any]]
"""A method, and its arguments."""


def _shorten(chain: list[Step]) -> None:
    """Let fewer calls do what a part of the chain does, the longest parts first."""
    for length in range(len(chain), 1, -1):
        for start in range(len(chain) - length + 1):
            part = chain[start : start + length]
            calls = _fewer(part[0].arguments[0], part[-1].results[0])
            if calls is not None and len(calls) < length:
                _put(calls, part)
                _shorten(chain[:start])
                _shorten(chain[start + length :])
                return


def _put(calls: list[Call], part: list[Step]) -> None:
    """Write calls into the last steps of a part; those before are not needed any more."""
    value: Value = part[0].arguments[0]
    for step, (method, arguments) in zip(part[-len(calls) :], calls, strict=True):
        step.function = f"torch.Tensor.{method}"
        step.arguments, step.named, step.call = [value, *arguments], {}, _MOVES[step.function]
        value = step.results[0]
        value.tensor = step.call(step.arguments[0].tensor, *arguments)


def _fewer(source: Value, result: Value) -> list[Call] | None:
    """One or two calls that move elements from their places in one value to those in another."""
    before = numbered_tensor(source.tensor.shape)
    after = compute(result, {source: before})
    sizes = list(result.tensor.shape)
    if torch.equal(before.flatten(), after.flatten()):
        is_flat = after.ndim == 2 and before.ndim > 2 and after.shape[0] == before.shape[0]
        return [("flatten", [1])] if is_flat else [("reshape", [sizes])]
    for axes in itertools.permutations(range(before.ndim)) if before.ndim == after.ndim <= _MOST_AXES else ():
        if _agree(before.permute(axes), after):
            return [("permute", [list(axes)])]
    for axes in itertools.permutations(range(after.ndim)) if after.ndim <= _MOST_AXES else ():
        split = [size for _, size in sorted(zip(axes, sizes, strict=True), key=lambda pair: pair[0])]
        if _agree(before.reshape([hint(size) for size in split]).permute(axes), after):
            return [("reshape", [split]), ("permute", [list(axes)])]
    for axes in itertools.permutations(range(before.ndim)) if before.ndim <= _MOST_AXES else ():
        if _agree(before.permute(axes).reshape(after.shape), after):
            return [("permute", [list(axes)]), ("reshape", [sizes])]
    return None


_MOST_AXES = 5


def _agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same; a few elements say so first."""
    if a.shape != b.shape or not a.numel():
        return a.shape == b.shape
    places = [tuple((i * 7919 + axis) % size for axis, size in enumerate(a.shape)) for i in range(1, 6)]
    return all(a[place] == b[place] for place in places) and torch.equal(a, b)


def _same_sizes(a: Value, b: Value) -> bool:
    return [str(size) for size in a.tensor.shape] == [str(size) for size in b.tensor.shape]


def is_idle(step: Step) -> bool:
    """Whether a call gives what it is given."""
    source = step.arguments[0] if step.arguments else None
    if not isinstance(source, Value) or not _same_sizes(source, step.results[0]):
        return False
    name = step.function.removeprefix("torch.Tensor.")
    if name in ("add", "sub") and step.arguments[1:] == [0]:
        return source.tensor.dtype == step.results[0].tensor.dtype
    return name in ("reshape", "expand") or (name == "permute" and list(step.arguments[1]) == sorted(step.arguments[1]))
