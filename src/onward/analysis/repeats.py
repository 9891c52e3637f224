"""Repeated blocks in a sequence of calls, recognized by names.

Names such as `blocks.0.norm.weight` and `blocks.1.norm.weight` number the blocks. Blocks are equal
if they compute the same from their own parameters. The values that a block computes for the next
one are carried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Item:
    """A node or a call."""

    key: Hashable
    """Key of the computation, without its inputs."""
    paths: tuple[str, ...]
    """Names of the state that it reads and writes."""
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """`count` equal blocks of `length` items each, from `start` on."""

    start: int
    length: int
    count: int
    prefix: str
    """Name of the container: what stands before the number."""
    first: int
    """The number of the first block."""
    carried: dict[Any, tuple[Any, Any]]
    """Value that the first block reads -> the output of the first block that replaces it, and of the last."""

    @property
    def end(self) -> int:
        return self.start + self.length * self.count


def find_repeats(items: Sequence[Item], results: Collection[Any] = ()) -> list[Repeat]:
    """Return the repeats of items, which do not overlap. `results` are read from outside."""
    finder = _Finder(items, results)
    repeats: list[Repeat] = []
    for prefix, starts in _number_blocks(items).items():
        repeat = next(finder.repeats(prefix, starts), None)
        if repeat and all(repeat.start >= other.end or other.start >= repeat.end for other in repeats):
            repeats.append(repeat)
    return sorted(repeats, key=lambda repeat: repeat.start)


def _number_blocks(items: Sequence[Item]) -> dict[str, dict[int, int]]:
    """Return, by container from the outermost in, the index where each numbered block starts."""
    first_items: dict[str, dict[int, int]] = {}
    for at, item in enumerate(items):
        for path in item.paths:
            words = path.split(".")
            for i, word in enumerate(words[:-1]):
                if word.isdecimal():
                    first_items.setdefault(".".join(words[:i]), {}).setdefault(int(word), at)
    return dict(sorted(first_items.items(), key=lambda pair: pair[0].count(".")))


_Slots = dict[Any, tuple[int, int]]
"""Carried value of the first block -> index of the item in a block, and of the output, that replaces it."""


class _Finder:
    def __init__(self, items: Sequence[Item], results: Collection[Any]):
        self._items = items
        self._sources = {value: (at, i) for at, item in enumerate(items) for i, value in enumerate(item.outputs)}
        self._readers: dict[Any, list[int]] = {}
        for at, item in enumerate(items):
            for value in item.inputs:
                self._readers.setdefault(value, []).append(at)
        for value in results:
            self._readers.setdefault(value, []).append(len(items))

    def repeats(self, prefix: str, starts: dict[int, int]) -> Iterator[Repeat]:
        """Yield the candidates in a container, the longest first."""
        numbers = sorted(starts)
        for count in range(len(numbers), 1, -1):
            for first, last in zip(numbers, numbers[count - 1 :], strict=False):
                if last - first != count - 1:
                    continue
                begin, length = starts[first], starts[first + 1] - starts[first]
                if length < 2 or any(starts[first + j] != begin + j * length for j in range(count)):
                    continue
                for start in range(begin, max(begin - length, -1), -1):  # a block may begin with items without names
                    if (repeat := self._repeat(start, length, count, prefix, first)) is not None:
                        yield repeat

    def _repeat(self, start: int, length: int, count: int, prefix: str, first: int) -> Repeat | None:
        end = start + length * count
        if end > len(self._items):
            return None
        slots: _Slots = {}
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

    def _follows(self, old: Any, new: Any, start: int, begin: int, length: int, slots: _Slots, fixed: set[Any]) -> bool:
        """True if `old` and `new` are the same value, or related alike in all blocks."""
        old_at, i = self._sources.get(old, (-1, 0))
        new_at, j = self._sources.get(new, (-1, 0))
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
        """True if nothing outside reads more than the carried values of the last block."""
        for at in range(start, end):
            block_end = start + ((at - start) // length + 1) * length
            for i, value in enumerate(self._items[at].outputs):
                last = max(self._readers.get(value, [at]))
                is_carried = ((at - start) % length, i) in slots
                allowed = len(self._items) + 1 if block_end == end and is_carried else block_end + length * is_carried
                if last >= allowed:
                    return False
        return True
