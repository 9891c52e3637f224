"""Blocks that repeat in a module list: one class for all, and a loop over the list."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from onward.analysis.repeats import Item, find_repeats
from onward.frameworks.program.calls import LoopStep, ProgramStep, Value, call_key, replace_values
from onward.frameworks.torch.program.layers import Structure
from onward.frameworks.torch.program.operators import ForwardCalls


@dataclasses.dataclass
class Block:
    """Modules of a list that compute the same."""

    path: str
    """Path of the list."""
    count: int
    program: ForwardCalls
    """Calls of the first module, of the tensor that the module before it returns, and of tensors that all read."""


def fold_blocks(
    program: ForwardCalls, structure: Structure, layers: Mapping[ProgramStep, str], literals: dict[str, str]
) -> tuple[list[ProgramStep], list[Block]]:
    """Return the calls with loops in place of blocks that repeat, and the blocks.

    `layers` are calls of layers -> their paths, `literals` paths of buffers -> expressions.
    """
    steps = _with_shared_first(program.steps, layers)
    blocks = []
    for repeat in reversed(find_repeats([_item(step, layers) for step in steps], list(program.outputs.values()))):
        path, first = repeat.prefix, f"{repeat.prefix}.0."
        body = steps[repeat.start : repeat.start + repeat.length]
        if structure.length(path) != repeat.count or repeat.first or len(repeat.carried) != 1:
            continue
        lines = [structure.lines_of(f"{path}.{i}", literals) for i in range(repeat.count)]
        if any(other != lines[0] for other in lines):
            continue
        ((carried, (result, last)),) = repeat.carried.items()
        shared = _captured(body, carried, first)
        known_sizes = {str(size) for value in (carried, *shared) for size in value.tensor.shape}
        inside = [layers[step] for step in body if step in layers]
        if not known_sizes.issuperset(_symbols([[step.arguments, step.named] for step in body])) or not all(
            path.startswith(first) for path in inside
        ):
            continue
        inner = Value(carried.tensor)
        call = ProgramStep("block", [inner, *shared])
        call.results = [Value(last.tensor, step=call)]
        loop = LoopStep("for", [carried], results=[last], steps=[call], over=structure.access(path))
        loop.inner, loop.new = [inner], call.results
        steps[repeat.start : repeat.end] = [loop]
        inputs = {carried: Value(carried.tensor, name="x"), **{value: _named(value) for value in shared}}
        calls = [_inside(step, structure.access(first[:-1]), step in layers, inputs) for step in body]
        forward = ForwardCalls(list(inputs.values()), {"": result}, calls, dict(program.sizes))
        blocks.append(Block(path, repeat.count, forward))
    return steps, blocks[::-1]


def _named(value: Value) -> Value:
    return Value(value.tensor, name=value.name or value.path.rpartition(".")[2] or "y")


def _inside(step: ProgramStep, owner: str, is_layer: bool, inputs: Mapping[Value, Value]) -> ProgramStep:
    """Return a call as the class of a block makes it."""
    function = step.function.replace(owner, "self", 1) if is_layer else step.function
    arguments, named = replace_values((step.arguments, step.named), inputs)
    call = dataclasses.replace(step, function=function, arguments=arguments, named=named)
    for value in step.results:
        value.step = call
    return call


def _with_shared_first(steps: Sequence[ProgramStep], layers: Mapping[ProgramStep, str]) -> list[ProgramStep]:
    """Move calls that no parameter is behind, such as those of a mask, before the first block, each once."""
    early: dict[Any, ProgramStep] = {}
    moved: set[ProgramStep] = set()
    same: dict[Value, Value] = {}
    for step in steps:
        step.arguments, step.named = replace_values((step.arguments, step.named), same)
        read = [value for value in step.values() if value.array is None]
        if step not in layers and all(v.step in moved or (v.step is None and not v.path) for v in read):
            key = call_key(step, lambda value: id(value) if value.array is None else _value_key(value)), step.item
            same |= dict(zip(step.results, early.setdefault(key, step).results, strict=True))
            moved.add(step)
    return [*early.values(), *(step for step in steps if step not in moved)]


def _symbols(argument: Any) -> Iterator[str]:
    """Yield the symbols of sizes in an argument."""
    for leaf in tree_leaves(argument):
        if isinstance(leaf, slice):
            yield from _symbols([leaf.start, leaf.stop, leaf.step])
        elif isinstance(leaf, torch.SymInt | torch.SymFloat):
            yield from map(str, leaf.node.expr.free_symbols)


def _item(step: ProgramStep, layers: Mapping[ProgramStep, str]) -> Item:
    read = list(step.values())
    paths = [*([layers[step]] if step in layers else []), *(value.path for value in read if value.path)]
    alike = dataclasses.replace(step, function="") if step in layers else step
    key = call_key(alike, _value_key), step.item, step.is_tuple, step.pattern, len(step.bodies) and id(step)
    return Item(key, tuple(paths), tuple(v for v in read if not v.path and v.array is None), tuple(step.results))


def _value_key(value: Value) -> Any:
    if value.path:
        return str(value.tensor.shape), str(value.tensor.dtype)
    return None if value.array is None else (str(value.array.dtype), value.array.shape, value.array.tobytes())


def _captured(steps: Sequence[ProgramStep], carried: Value, path: str) -> list[Value]:
    """Return what a block reads beside its own tensors, its input and numbers."""
    inside = {carried, *(value for step in steps for value in step.results)}
    outside = [value for step in steps for value in step.values() if value not in inside]
    is_number = [value.array is not None and not value.array.ndim for value in outside]
    return list(
        dict.fromkeys(
            v
            for v, is_constant in zip(outside, is_number, strict=True)
            if not is_constant and not v.path.startswith(path)
        )
    )
