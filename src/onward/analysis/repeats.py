"""Blocks that a graph repeats: layers of a transformer, stages of a network of residuals.

Blocks are known by the names of what they hold, `blocks.0.norm.weight`, `blocks.1.norm.weight`, and are the same if
they compute the same from it. What one block computes for the next is carried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Item:
    """A node or a call, as far as it matters here."""

    key: Hashable
    """What it computes, whatever its inputs are."""
    paths: tuple[str, ...]
    """The names of the state that it reads and writes."""
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """Items from `start` on, as many as `length`, and those that follow and are the same."""

    start: int
    length: int
    count: int
    prefix: str
    """What blocks are called before their number."""
    first: int
    """The number of the first block."""
    carried: dict[Any, tuple[Any, Any]]
    """By what the first block reads from before it: what it makes of that for the next, and the last of all."""

    @property
    def end(self) -> int:
        return self.start + self.length * self.count


def find_repeats(items: Sequence[Item], results: Collection[Any] = ()) -> list[Repeat]:
    """All that follow one another and do not overlap; `results` are read by others."""
    finder = _Finder(items, results)
    found: list[Repeat] = []
    for prefix, starts in _number_blocks(items).items():
        repeat = next(finder.repeats(prefix, starts), None)
        if repeat and all(repeat.start >= other.end or other.start >= repeat.end for other in found):
            found.append(repeat)
    return sorted(found, key=lambda repeat: repeat.start)


def _number_blocks(items: Sequence[Item]) -> dict[str, dict[int, int]]:
    """By the names of containers, the outermost first: where the block of each number is first mentioned."""
    found: dict[str, dict[int, int]] = {}
    for at, item in enumerate(items):
        for path in item.paths:
            parts = path.split(".")
            for i, part in enumerate(parts[:-1]):
                if part.isdecimal():
                    found.setdefault(".".join(parts[:i]), {}).setdefault(int(part), at)
    return dict(sorted(found.items(), key=lambda pair: pair[0].count(".")))


class _Finder:
    def __init__(self, items: Sequence[Item], results: Collection[Any]):
        self._items = items
        self._made = {value: (at, i) for at, item in enumerate(items) for i, value in enumerate(item.outputs)}
        self._read: dict[Any, list[int]] = {}
        for at, item in enumerate(items):
            for value in item.inputs:
                self._read.setdefault(value, []).append(at)
        for value in results:
            self._read.setdefault(value, []).append(len(items))

    def repeats(self, prefix: str, starts: dict[int, int]) -> Iterator[Repeat]:
        """Those of a container, the longest first."""
        numbers = sorted(starts)
        for count in range(len(numbers), 1, -1):
            for i in range(len(numbers) - count + 1):
                chosen = numbers[i : i + count]
                length = starts[chosen[1]] - starts[chosen[0]]
                steady = all(starts[number] == starts[chosen[0]] + j * length for j, number in enumerate(chosen))
                if length < 2 or not steady or chosen[-1] - chosen[0] != count - 1:
                    continue
                for earlier in range(min(length, starts[chosen[0]] + 1)):
                    found = self._repeat(starts[chosen[0]] - earlier, length, count, prefix, chosen[0])
                    if found is not None:
                        yield found

    def _repeat(self, start: int, length: int, count: int, prefix: str, first: int) -> Repeat | None:
        end = start + length * count
        if end > len(self._items):
            return None
        slots: dict[Any, tuple[int, int]] = {}
        fixed: set[Any] = set()
        for at in range(start, end - length):
            number = (at - start) // length
            names = f"{prefix}.{first + number}.", f"{prefix}.{first + number + 1}."
            if not self._are_alike(self._items[at], self._items[at + length], *names):
                return None
            begin = start + number * length
            for old, new in zip(self._items[at].inputs, self._items[at + length].inputs, strict=True):
                if not self._follows(old, new, start, begin, length, slots, fixed):
                    return None
        if not fixed.isdisjoint(slots) or not self._stays_inside(start, length, end, set(slots.values())):
            return None
        last = end - length
        carried = {
            value: (self._items[start + at].outputs[i], self._items[last + at].outputs[i])
            for value, (at, i) in slots.items()
        }
        return Repeat(start, length, count, prefix, first, carried)

    @staticmethod
    def _are_alike(a: Item, b: Item, old: str, new: str) -> bool:
        same = a.key == b.key and len(a.inputs) == len(b.inputs) and len(a.outputs) == len(b.outputs)
        return same and tuple(new + p[len(old) :] if p.startswith(old) else p for p in a.paths) == b.paths

    def _follows(
        self,
        old: Any,
        new: Any,
        start: int,
        begin: int,
        length: int,
        slots: dict[Any, tuple[int, int]],
        fixed: set[Any],
    ) -> bool:
        """Whether what a block reads, and what the next reads in its place, are the same in each."""
        old_at, i = self._made.get(old, (-1, 0))
        new_at, j = self._made.get(new, (-1, 0))
        if old == new:
            fixed.add(old)
            return old_at < start
        if begin <= old_at < begin + length:
            return (new_at, j) == (old_at + length, i)
        if not begin <= new_at < begin + length:
            return False
        slot = new_at - begin, j
        if begin == start:
            return old_at < start and slots.setdefault(old, slot) == slot
        return (old_at, i) == (begin - length + slot[0], slot[1]) and slot in slots.values()

    def _stays_inside(self, start: int, length: int, end: int, slots: set[tuple[int, int]]) -> bool:
        """Whether others read only what the last block carries."""
        for at in range(start, end):
            block_end = start + ((at - start) // length + 1) * length
            for i, value in enumerate(self._items[at].outputs):
                last = max(self._read.get(value, [at]))
                is_carried = ((at - start) % length, i) in slots
                allowed = len(self._items) + 1 if block_end == end and is_carried else block_end + length * is_carried
                if last >= allowed:
                    return False
        return True
