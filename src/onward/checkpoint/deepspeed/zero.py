"""What ZeRO spreads over processes, put together: parameters and the state of optimizers in flat partitions.

In stages 1 and 2 the parameters of a group stand one after the other in a line that is cut into as many parts as there
are processes. In stage 3 each parameter is cut into as many parts, and each process has its parts in a line. What is
found here are places in these lines: nothing is read.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from onward.checkpoint.pytorch.optimizers import is_optimizer_state
from onward.checkpoint.pytorch.trees import mapping
from onward.run_state.state import COUNT, MASTER
from onward.run_state.tensors import JoinedTensor, StoredTensor, Tensor, contiguous_strides, count_of

Shapes = Mapping[str, tuple[int, ...]]
Slots = dict[Any, dict[str, Any]]
"""By parameter; those of stage 0 may be numbers."""


class Kept(NamedTuple):
    """What an optimizer keeps, in whole tensors."""

    groups: list[dict[str, Any]]
    """As PyTorch has them: settings, and `params`, which are names or numbers."""
    slots: Slots
    clip: float | None = None
    scaler: Any = None


def named_groups(groups: Sequence[Mapping[str, Any]], shapes: Sequence[Shapes]) -> list[dict[str, Any]]:
    """Groups whose `params` are names: those that there were are numbers of lines."""
    return [{**group, "params": [name for line in group["params"] for name in shapes[line]]} for group in groups]


class Line:
    """Flat tensors, one after the other, as one."""

    def __init__(self, tensors: Sequence[Any]):
        if not all(isinstance(each, StoredTensor) and len(each.shape) == 1 and each.is_contiguous for each in tensors):
            raise ValueError("a partition is no flat tensor")
        if len({each.dtype for each in tensors}) > 1:
            raise ValueError("its partitions are of several types")
        self._tensors: list[StoredTensor] = list(tensors)
        self._starts = [0, *itertools.accumulate(each.shape[0] for each in self._tensors)]

    def cut(self, start: int, count: int) -> list[StoredTensor]:
        """The pieces that hold so many elements from a place on."""
        if start + count > self._starts[-1]:
            raise ValueError("its partitions are shorter than the parameters that they hold")
        found, at = [], max(bisect_right(self._starts, start) - 1, 0)
        while count:
            piece, begin = self._tensors[at], start - self._starts[at]
            taken = min(piece.shape[0] - begin, count)
            if taken:
                offset = piece.offset + begin * piece.dtype.itemsize
                found.append(dataclasses.replace(piece, offset=offset, shape=(taken,), strides=(1,)))
            start, count, at = start + taken, count - taken, at + 1
        return found


def join_pieces(pieces: Sequence[StoredTensor], shape: tuple[int, ...]) -> Tensor:
    """Pieces as one tensor: a place in a file where that is all."""
    if sum(piece.shape[0] for piece in pieces) != math.prod(shape) or not pieces:
        raise ValueError("pieces of a parameter are missing")
    if len(pieces) == 1:
        return dataclasses.replace(pieces[0], shape=shape, strides=contiguous_strides(shape))
    return JoinedTensor(pieces[0].dtype, shape, tuple(pieces))


def partitioned_groups(
    shapes: Sequence[Shapes], parts: Sequence[Mapping[str, Any]], paddings: Sequence[Sequence[int]] | None
) -> Slots:
    """The slots of each parameter in stages 1 and 2. `parts` are of the processes; `paddings` follow parameters."""
    slots: Slots = {}
    for number, group in enumerate(shapes):
        kept = _partitions([part["base_optimizer_state"]["state"].get(number, {}) for part in parts])
        kept[MASTER] = [part["single_partition_of_fp32_groups"][number] for part in parts]
        lines = {slot: Line(held) for slot, held in kept.items() if slot != COUNT}
        gaps = paddings[number] if paddings else [0] * len(group)
        at = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            slots[name] = {slot: join_pieces(line.cut(at, math.prod(shape)), shape) for slot, line in lines.items()}
            slots[name] |= with_count(kept, COUNT)
            at += math.prod(shape) + gap
    return slots


def partitioned_parameters(shapes: Sequence[Shapes], parts: Sequence[Mapping[str, Any]]) -> Slots:
    """The slots of each parameter in stage 3, where groups may be cut into smaller ones."""
    slots: Slots = {}
    for number, group in enumerate(shapes):
        kept = _partitions([part["optimizer_state_dict"]["state"].get(number, {}) for part in parts])
        kept[MASTER] = [part["fp32_flat_groups"][number] for part in parts]
        lines = {slot: [Line([each]) for each in held] for slot, held in kept.items() if slot != COUNT}
        at = 0
        for name, shape in group.items():
            slots[name] = {slot: across(held, at, shape) for slot, held in lines.items()}
            slots[name] |= with_count(kept, COUNT)
            at += _share(shape, len(parts))
    return slots


def across(lines: Sequence[Line], at: int, shape: tuple[int, ...]) -> Tensor:
    """A parameter of which each process has as many elements, from the same place on; the last ones are padded."""
    share, left = _share(shape, len(lines)), math.prod(shape)
    pieces: list[StoredTensor] = []
    for line in lines:
        pieces += line.cut(at, min(share, left))
        left -= min(share, left)
    return join_pieces(pieces, shape)


def with_count(slots: Mapping[str, Any], *wanted: str) -> dict[str, Any]:
    """Slots, or those that are wanted, with the count of updates as a number."""
    found = {slot: value for slot, value in slots.items() if not wanted or slot in wanted}
    count = found.get(COUNT)
    if isinstance(count, Tensor) and not count.shape:
        found[COUNT] = count_of(count)
    return found


def _share(shape: tuple[int, ...], processes: int) -> int:
    return -(-math.prod(shape) // processes)


def _partitions(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the processes keep for a group, by slot: a list of partitions; what counts updates is the same for all."""
    first = states[0]
    if any(state.keys() != first.keys() for state in states):
        raise ValueError("its processes keep different things")
    flat = {slot for slot, value in first.items() if isinstance(value, Tensor) and len(value.shape) == 1}
    return {
        slot: [state[slot] for state in states] if slot in flat else value
        for slot, value in first.items()
        if slot in flat or slot == COUNT
    }


# ---- stage 0 ---------------------------------------------------------------------------------------------------------


def read_unpartitioned(model: Mapping[str, Any]) -> Kept:
    """What stage 0 keeps, which is PyTorch's own state, by numbers, with copies of narrower weights beside it."""
    outer = mapping(model.get("optimizer"))
    state = outer if is_optimizer_state(outer) else mapping(outer.get("optimizer_state_dict"))
    masters = outer.get("fp32_groups")
    if not is_optimizer_state(state) or (state is not outer and not isinstance(masters, list)):
        return Kept([], {})
    slots = numbered_slots(state, masters if state is not outer else None)
    return Kept([dict(group) for group in state["param_groups"]], slots)


def numbered_slots(state: Mapping[str, Any], masters: Iterable[Iterable[Any]] | None) -> Slots:
    """What PyTorch's own state keeps, by number, with the copies of narrower weights, which are in the same order."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    slots = {number: with_count(mapping(mapping(state.get("state")).get(number))) for number in numbers}
    if masters is not None:
        for number, copy in zip(numbers, itertools.chain.from_iterable(masters), strict=True):
            slots[number][MASTER] = copy
    return slots
