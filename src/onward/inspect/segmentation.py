"""Where a row of operators begins to repeat itself.

Of all ways to cut a row that its words or the names of its parameters suggest, the one is taken that is the shortest
description of it: one block, what is different in the others, and what belongs to none. A cut is a place where little
is handed on, so what is read soon after it counts against it unless it is a single value.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

_BLOCK_COST, _CHANGE_COST, _LONG_COST, _EXCESS_COST, _GAP_COST = 0.5, 0.5, 0.1, 1.0, 2.0
_NAMES_PREFERRED = 0.75
_MOST_DIFFERENT = 0.5
"""Of a block, in parts of its length; what is less alike is none."""
_GRAMS = 1, 2, 4, 8, 16, 32
"""How many words are looked at to know a place again."""
_WINDOW = 8
_MOST_LEFT, _MOST_LEFT_INSIDE = 0.9, 0.7
"""Of the length of a row, and of a block: what a description of it by blocks may need."""
_NUMBER = re.compile(r"\d+")


Words = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """Operators in their order."""

    words: Sequence[Hashable]
    """What each computes, roughly."""
    details: Sequence[Hashable]
    """What each computes, with the sizes of its parameters."""
    paths: Sequence[str]
    """The name of the first parameter that each reads, or nothing."""
    lives: Sequence[tuple[int, int]]
    """Of each value that is handed on: who makes it, and who reads it last."""


class Span(NamedTuple):
    """A block: `row[start:end]`."""

    start: int
    end: int


def find_spans(row: Row) -> list[Span]:
    """The blocks of a row, which do not overlap, in order; at least two, or none."""
    finder = _Finder(row)
    found = finder.best(0, len(row.words))
    if not found:
        return []
    least = sum(end - start for start, end in found) / len(found) / 2
    spans = list(found)
    for start, end in _gaps(found, len(row.words)):  # where layers of another kind may be: a decoder's
        more = finder.best(start, end) or finder.before(end, start, found)
        spans += more if more and min(span.end - span.start for span in more) >= least else []
    return _merge_pairs(sorted(spans), row)


def _merge_pairs(spans: list[Span], row: Row) -> list[Span]:
    """Where two take turns that are the same each time, the two are the block, unless names say so."""
    if any(map(_NUMBER.search, row.paths)):
        return spans
    kinds = [tuple(row.details[start:end]) for start, end in spans]
    merged: list[Span] = []
    at = 0
    while at < len(spans):
        count = 0
        while kinds[at : at + 2] == kinds[at + 2 * count : at + 2 * count + 2] and _follow(spans, at + 2 * count):
            count += 1
        if count > 1 and kinds[at] != kinds[at + 1]:
            merged += [Span(spans[at + 2 * i].start, spans[at + 2 * i + 1].end) for i in range(count)]
            at += 2 * count
        else:
            merged.append(spans[at])
            at += 1
    return merged


def _follow(spans: Sequence[Span], at: int) -> bool:
    return at + 1 < len(spans) and spans[at].end == spans[at + 1].start


def _gaps(spans: Sequence[Span], length: int) -> Iterator[tuple[int, int]]:
    ends = [0, *(span.end for span in spans)]
    starts = [*(span.start for span in spans), length]
    return ((end, start) for end, start in zip(ends, starts, strict=True) if start > end)


class _Finder:
    def __init__(self, row: Row):
        numbers: dict[Hashable, int] = {}
        self._words = [numbers.setdefault(word, len(numbers)) for word in row.words]
        self._paths = row.paths
        self._repeating: dict[Words, bool] = {}
        self._crossing: list[list[int]] = [[] for _ in row.words]
        """At each place, who reads last what is handed on across it."""
        for made, read in row.lives:
            for at in range(made + 1, read + 1):
                self._crossing[at].append(read)

    def best(self, start: int, end: int) -> list[Span]:
        return self._best(start, end, _MOST_LEFT * (end - start))

    def _best(self, start: int, end: int, least: float) -> list[Span]:
        """The cheapest way of those that cost less."""
        best: list[Span] = []
        seen: set[Words] = set()
        named = ((cuts, _NAMES_PREFERRED) for cuts in self._cuts_by_name(start, end))
        for cuts, factor in (*named, *((cuts, 1.0) for cuts in self._cuts_by_words(start, end))):
            if len(cuts) < 2 or tuple(cuts) in seen:
                continue
            seen.add(tuple(cuts))
            cost, spans = self._evaluate(cuts, start, end)
            if cost * factor < least and len(spans) > 1 and not self._repeats_itself(spans):
                least, best = cost * factor, spans
        return best

    def before(self, end: int, start: int, spans: Sequence[Span]) -> list[Span]:
        """A block that ends where others begin, and lacks what they begin with."""
        models = [tuple(self._words[span.start : span.end])[::-1] for span in spans if span.start >= end][:1]
        piece = tuple(self._words[start:end])[::-1]
        return [Span(end - length, end) for model in models if (length := _fit(piece, model)[0])]

    # ---- places to cut -----------------------------------------------------------------------------------------------

    def _cuts_by_name(self, start: int, end: int) -> Iterator[list[int]]:
        """Where the first number of names changes, or the first two, and so on."""
        for depth in range(1, 5):
            cuts, last, key = [], start - 1, ""
            for at in range(start, end):
                if self._paths[at]:
                    new = _container(self._paths[at], depth)
                    if new != key:
                        gap = range(last + 1, at + 1)
                        cuts.append(min(gap, key=lambda place: (max(len(self._crossing[place]), 1), -place)))
                    last, key = at, new
            yield cuts

    def _cuts_by_words(self, start: int, end: int) -> Iterator[list[int]]:
        """Where the same words follow, and little is handed on."""
        narrow = [at for at in range(start, end) if self._is_narrow(at)]
        for length in _GRAMS:
            places: dict[Words, list[int]] = {}
            for at in narrow:
                places.setdefault(tuple(self._words[at : at + length]), []).append(at)
            for found in places.values():
                if len(found) > 1:
                    widths = sorted({len(self._crossing[at]) for at in found})
                    for width in widths[:3]:
                        yield [at for at in found if len(self._crossing[at]) <= width]
                    yield found

    def _is_narrow(self, at: int) -> bool:
        around = self._crossing[max(at - _WINDOW, 1) : at + _WINDOW + 1]
        return len(self._crossing[at]) <= min(map(len, around), default=0)

    def _repeats_itself(self, spans: Sequence[Span]) -> bool:
        """Whether blocks of a length that is usual are several themselves."""
        start, end = sorted(spans, key=lambda span: span.end - span.start)[len(spans) // 2]
        words = tuple(self._words[start:end])
        if words not in self._repeating:
            self._repeating[words] = bool(self._best(start, end, _MOST_LEFT_INSIDE * (end - start)))
        return self._repeating[words]

    # ---- what they cost ----------------------------------------------------------------------------------------------

    def _evaluate(self, cuts: Sequence[int], start: int, end: int) -> tuple[float, list[Span]]:
        pieces = [tuple(self._words[a:b]) for a, b in zip(cuts, [*cuts[1:], end], strict=True)]
        counts = Counter(pieces)
        costs = [(self._difference(model, counts), model) for model in _models(counts)]
        (cost, ends), _ = min(costs, key=lambda pair: pair[0][0])
        spans = [Span(at, at + ends[piece]) for at, piece in zip(cuts, pieces, strict=True) if ends[piece]]
        after = end - max((span.end for span in spans), default=start)  # which is no gap, but what follows
        cost += (
            cuts[0] - start - (_GAP_COST - 1) * after + sum(self._handing_on(spans, end)) + sum(self._changes(spans))
        )
        return cost, spans

    @staticmethod
    def _difference(model: Words, counts: Counter[Words]) -> tuple[float, dict[Words, int]]:
        """What there is to say if one is like `model`, and how much of each is a block."""
        cost, ends = float(len(model)), {}
        for piece, count in counts.items():
            ends[piece], different = _fit(piece, model)
            cost += different + _GAP_COST * count * (len(piece) - ends[piece])
        return cost, ends

    def _changes(self, spans: Sequence[Span]) -> Iterator[float]:
        """What is different from one block to the next."""
        words = [tuple(self._words[start:end]) for start, end in spans]
        return (_CHANGE_COST * _differences(a, b)[-1] for a, b in itertools.pairwise(words) if a != b)

    def _handing_on(self, spans: Sequence[Span], end: int) -> Iterator[float]:
        places = sorted({place for span in spans for place in span if place < end})
        for at, following in zip(places, [*places[1:], end], strict=True):
            soon = sum(read < following for read in self._crossing[at])
            long = len(self._crossing[at]) - soon
            yield _BLOCK_COST + _EXCESS_COST * max(soon - 1, 0) + _LONG_COST * long


def _models(counts: Counter[Words]) -> list[Words]:
    """Blocks that others may be like: the most common ones, and those of a usual length."""
    by_length = sorted(counts, key=len)
    middle = len(by_length) // 2
    return list(dict.fromkeys([piece for piece, _ in counts.most_common(2)] + by_length[middle : middle + 2]))


def _container(path: str, depth: int) -> str:
    """`encoder.layer.3` of `encoder.layer.3.norm1.weight`, where one number counts."""
    numbers = list(_NUMBER.finditer(path))
    return path[: numbers[depth - 1].end()] if len(numbers) >= depth else path.rpartition(".")[0] or path


@functools.lru_cache(4096)
def _fit(piece: Words, model: Words) -> tuple[int, int]:
    """How much of a piece is a block like another, and how much is different: nothing of it, if that is too much."""
    different = _differences(piece[: 2 * len(model) + _WINDOW], model)
    end = min(range(len(different)), key=lambda n: (different[n] - n, different[n]))
    return (end, different[end]) if different[end] <= _MOST_DIFFERENT * max(end, len(model)) else (0, 0)


@functools.lru_cache(4096)
def _differences(piece: Words, model: Words) -> list[int]:
    """How many words have to be changed to make the model of no word of a piece, of the first, the first two, ..."""
    row = list(range(len(model) + 1))
    different = [row[-1]]
    for i, new in enumerate(piece):
        old, row = row, [i + 1]
        for j, word in enumerate(model):
            row.append(min(old[j] + (new != word), old[j + 1] + 1, row[j] + 1))
        different.append(row[-1])
    return different
