"""Where a row of operators begins to repeat itself.

Of all ways to cut a row that its words or the names of its parameters suggest, the one is taken that is the shortest
description of it: one block, what is different in the others, what changes from one to the next, and what belongs to
none. A cut is a place where little is handed on: what is read soon after it counts against it, unless it is one value.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

_BLOCK_COST, _CHANGE_COST, _GAP_COST = 0.5, 0.5, 2.0
"""Of a cut, of a word that is different from one block to the next, of a word between blocks."""
_EXCESS_COST, _LONG_COST = 3.0, 0.25
"""Of a cut across which more than one value is handed on that is read soon, and of each that is read later."""
_NAMES_PREFERRED = 0.6
_MOST_DIFFERENT, _MOST_DIFFERENT_BESIDE = 0.5, 0.3
"""Of a block, in parts of its length; what is less alike is none. Where no cut was suggested, it must be more alike."""
_MOST_LEFT, _MOST_LEFT_INSIDE = 0.9, 0.7
"""Of the length of a row, and of a block: what a description of it by blocks may need."""
_GRAMS = 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64
"""How many words are looked at to know a place again."""
_DEPTHS = range(1, 5)
"""How many numbers of a name are looked at."""
_MOST_RUNS = 200
_NUMBER = re.compile(r"\d+")

Words = tuple[int, ...]
"""Those of operators that read parameters are odd."""


@dataclasses.dataclass(frozen=True)
class OperatorRow:
    """Operators in their order."""

    words: Sequence[Hashable]
    """What each computes, roughly."""
    details: Sequence[Hashable]
    """What each computes, with the sizes of its parameters."""
    reads_parameters: Sequence[bool]
    paths: Sequence[str]
    """The name of the first parameter that each reads, if no other does, or nothing."""
    lives: Sequence[tuple[int, int]]
    """Of each value that is handed on: who makes it, and who reads it last."""


class Span(NamedTuple):
    """A block: `row[start:end]`."""

    start: int
    end: int


def find_spans(row: OperatorRow) -> list[Span]:
    """The blocks of a row, which do not overlap, in order; at least two, or none."""
    finder = _Finder(row)
    spans, by_name = finder.best(0, len(row.words))
    if not spans:
        return []
    least = sum(end - start for start, end in spans) / len(spans) / 2
    for start, end in list(_gaps(spans, len(row.words))):
        found, _ = finder.best(start, end)
        spans += found if found and min(span.end - span.start for span in found) >= least else []
    spans = finder.trim(sorted(spans))
    return spans if by_name else finder.merge_pairs(spans)


def _gaps(spans: Sequence[Span], length: int) -> Iterator[tuple[int, int]]:
    ends = [0, *(span.end for span in spans)]
    starts = [*(span.start for span in spans), length]
    return ((end, start) for end, start in zip(ends, starts, strict=True) if start > end)


class _Finder:
    def __init__(self, row: OperatorRow):
        numbers: dict[Hashable, int] = {}
        self._words = tuple(
            2 * numbers.setdefault(word, len(numbers)) + reads
            for word, reads in zip(row.words, row.reads_parameters, strict=True)
        )
        self._details = row.details
        self._paths = row.paths
        self._repeating: dict[Words, bool] = {}
        self._crossing: list[list[int]] = [[] for _ in row.words]
        """At each place, who reads last what is handed on across it."""
        for made, read in row.lives:
            for at in range(made + 1, read + 1):
                self._crossing[at].append(read)

    def best(self, start: int, end: int) -> tuple[list[Span], bool]:
        """The cheapest blocks in a part of the row, if any make it shorter, and whether names told."""
        least, best, by_name = _MOST_LEFT * (end - start), list[Span](), False
        for cuts in self._cuts_by_name(start, end):
            cost, spans = self._evaluate(cuts, start, end, least / _NAMES_PREFERRED)
            if cost * _NAMES_PREFERRED < least and len(spans) > 1:
                least, best, by_name = cost * _NAMES_PREFERRED, spans, True
        for cuts in self._cuts_by_words(start, end):
            cost, spans = self._evaluate(cuts, start, end, least)
            if cost < least and len(spans) > 1 and not self._repeats_itself(spans):
                least, best, by_name = cost, spans, False
        return best, by_name

    def _repeats_itself(self, spans: Sequence[Span]) -> bool:
        """Whether blocks of a length that is usual are several themselves."""
        start, end = sorted(spans, key=lambda span: span.end - span.start)[len(spans) // 2]
        words = self._words[start:end]
        if words not in self._repeating:
            most = _MOST_LEFT_INSIDE * (end - start)
            found = (self._evaluate(cuts, start, end, most, excess=0) for cuts in self._cuts_by_words(start, end))
            self._repeating[words] = any(cost < most and len(inner) > 1 for cost, inner in found)
        return self._repeating[words]

    # ---- the last touches --------------------------------------------------------------------------------------------

    def trim(self, spans: list[Span]) -> list[Span]:
        """Blocks without what follows them, where their beginning is another block."""
        words = [self._words[start:end] for start, end in spans]
        trimmed = []
        for (start, end), whole in zip(spans, words, strict=True):
            shorter = max((len(other) for other in words if other == whole[: len(other)] and other != whole), default=0)
            is_narrow = shorter and len(self._crossing[start + shorter]) <= 1
            trimmed.append(Span(start, start + shorter if is_narrow else end))
        return trimmed

    def merge_pairs(self, spans: list[Span]) -> list[Span]:
        """Where two kinds take turns, such as attention to oneself and to an encoder, both are one block."""
        merged: list[Span] = []
        while spans:
            count = self._turns(spans) // 2 * 2
            merged += [Span(spans[i].start, spans[i + 1].end) for i in range(0, count, 2)] or spans[:1]
            spans = spans[max(count, 1) :]
        return merged

    def _turns(self, spans: Sequence[Span]) -> int:
        """How many of the first blocks take turns; none, unless some of them are the same each time."""
        words = [self._words[start:end] for start, end in spans]
        kinds = [tuple(self._details[start:end]) for start, end in spans]
        count = 1
        while count < len(spans) and spans[count - 1].end == spans[count].start and words[count] != words[count - 1]:
            if count > 1 and not _are_alike(words[count], words[count - 2]):
                break
            count += 1
        same = sum(a == b for a, b in zip(kinds[:count], kinds[2:count], strict=False))
        return count if same > 1 else 0

    # ---- places to cut -----------------------------------------------------------------------------------------------

    def _cuts_by_name(self, start: int, end: int) -> Iterator[list[int]]:
        """Where the first number of names changes, or one of the first two, and so on."""
        for depth in _DEPTHS:
            cuts, last, key = [], start - 1, ""
            for at in range(start, end):
                if self._paths[at]:
                    new = _container(self._paths[at], depth)
                    if new != key:
                        gap = range(last + 1, at + 1)
                        cuts.append(min(gap, key=lambda place: (max(len(self._crossing[place]), 1), -place)))
                    last, key = at, new
            if len(cuts) > 1:
                yield cuts

    def _cuts_by_words(self, start: int, end: int) -> list[list[int]]:
        """Where the same words follow, and little is handed on."""
        narrow = [at for at in range(start, end) if self._is_narrow(at, start, end)]
        found: dict[tuple[int, ...], None] = {}
        for length in _GRAMS:
            places: dict[Words, list[int]] = {}
            for at in narrow:
                places.setdefault(self._words[at : min(at + length, end)], []).append(at)
            for same in places.values():
                widths = sorted({len(self._crossing[at]) for at in same})
                for width in {*widths[:2], widths[-1]}:
                    found[tuple(at for at in same if len(self._crossing[at]) <= width)] = None
        cuts = [list(places) for places in found if len(places) > 1]
        runs = [places for places in cuts if len({self._words[a:b] for a, b in itertools.pairwise(places)}) == 1]
        both = [a + b for a, b in itertools.product(runs, runs) if a[-1] < b[0]]  # an encoder, and a decoder
        return cuts + both[:_MOST_RUNS]

    def _is_narrow(self, at: int, start: int, end: int) -> bool:
        """Whether more is handed on after it, or no less before it."""
        before, here, after = (len(self._crossing[place]) for place in (at - 1, at, min(at + 1, end - 1)))
        return at == start or here < after or here <= before

    # ---- what they cost ----------------------------------------------------------------------------------------------

    def _evaluate(
        self, cuts: Sequence[int], start: int, end: int, most: float, excess: float = _EXCESS_COST
    ) -> tuple[float, list[Span]]:
        """What a row costs that is cut in these places, and its blocks; none, if it must cost more than `most`."""
        pieces = [self._words[a:b] for a, b in zip(cuts, [*cuts[1:], end], strict=True)]
        counts = Counter(pieces)
        models = [model for model in _models(counts) if _least_cost(model, counts) < most]
        if not models:
            return most, []
        described = ((*_describe(model, counts), model) for model in models)
        cost, lengths, model = min(described, key=lambda found: found[0])
        before = self._words[start : cuts[0]][::-1]  # a block that lacks what others begin with, perhaps
        lacking, different = _fit(before, model[::-1], _MOST_DIFFERENT_BESIDE)
        spans = [Span(cuts[0] - lacking, cuts[0])] if lacking else []
        for at, piece in zip(cuts, pieces, strict=True):
            for length in lengths[piece]:
                spans.append(Span(at, at + length))
                at += length
        after = end - max((span.end for span in spans), default=start)  # which is no gap, but what follows
        cost += cuts[0] - start - lacking + different - (_GAP_COST - 1) * after
        return cost + sum(self._changes(spans)) + sum(self._handing_on(spans, end, excess)), spans

    def _changes(self, spans: Sequence[Span]) -> Iterator[float]:
        """What is different from one block to the next."""
        words = [self._words[start:end] for start, end in spans]
        return (_CHANGE_COST * _differences(a, b)[-1] for a, b in itertools.pairwise(words) if a != b)

    def _handing_on(self, spans: Sequence[Span], end: int, excess: float) -> Iterator[float]:
        places = sorted({place for span in spans for place in span if place < end})
        for at, following in itertools.pairwise([*places, end]):
            soon = sum(read < following for read in self._crossing[at])
            yield _BLOCK_COST + excess * (soon > 1) + _LONG_COST * (len(self._crossing[at]) - soon)


def _container(path: str, depth: int) -> str:
    """`encoder.layer.3` of `encoder.layer.3.norm1.weight`, where one number counts."""
    numbers = list(_NUMBER.finditer(path))
    return path[: numbers[depth - 1].end()] if len(numbers) >= depth else path.rpartition(".")[0] or path


def _models(counts: Counter[Words]) -> list[Words]:
    """Blocks that others may be like: the most common ones, and those of a usual length."""
    by_length = sorted(counts, key=len)
    middle = len(by_length) // 2
    return list(dict.fromkeys([piece for piece, _ in counts.most_common(2)] + by_length[middle : middle + 2]))


def _least_cost(model: Words, counts: Counter[Words]) -> int:
    """What there is to say at least, by the number of words of each kind, which is known sooner."""
    expected, cost = Counter(model), len(model)
    for piece in counts:
        if len(piece) < 1.5 * len(model):  # a longer one may be several
            found = Counter(piece)
            cost += min(len(piece), max((expected - found).total(), (found - expected).total()))
    return cost


def _describe(model: Words, counts: Counter[Words]) -> tuple[float, dict[Words, list[int]]]:
    """What there is to say if one block is `model`, and how long the blocks are that each piece begins with."""
    cost, lengths = float(len(model)), {}
    for piece, count in counts.items():
        lengths[piece], different = _split(piece, model)
        cost += different + _GAP_COST * count * (len(piece) - sum(lengths[piece]))
    return cost, lengths


@functools.lru_cache(4096)
def _split(piece: Words, model: Words) -> tuple[list[int], int]:
    """The lengths of the blocks that a piece begins with, and how much is different in them."""
    lengths, total = [], 0
    length, different = _fit(piece, model, _MOST_DIFFERENT)
    while length:
        lengths.append(length)
        total += different
        piece = piece[length:]
        length, different = _fit(piece, model, _MOST_DIFFERENT_BESIDE)
    return lengths, total


@functools.lru_cache(4096)
def _fit(piece: Words, model: Words, most: float) -> tuple[int, int]:
    """How much of a piece is a block like another, and how much is different: nothing of it, if that is too much."""
    different = _differences(piece[: 2 * len(model) + 1], model)
    end = min(range(len(different)), key=lambda n: (different[n] - n, different[n]))
    return (end, different[end]) if end > 1 and _are_alike(piece[:end], model, most) else (0, 0)


def _are_alike(a: Words, b: Words, most: float = _MOST_DIFFERENT_BESIDE) -> bool:
    """Whether few words are different, and of those with parameters fewer than so many."""
    a_reads, b_reads = (tuple(word for word in words if word % 2) for words in (a, b))
    is_near = _differences(a, b)[-1] <= most * max(len(a), len(b))
    return is_near and _differences(a_reads, b_reads)[-1] < most * max(len(a_reads), len(b_reads), 1)


@functools.lru_cache(4096)
def _differences(piece: Words, model: Words) -> list[int]:
    """How many words have to be changed to make the model of no word of a piece, of the first, the first two, ..."""
    words, steps = np.array(model), np.arange(len(model) + 1)
    row = steps
    different = [len(model)]
    for new in piece:
        changed = np.concatenate([row[:1] + 1, np.minimum(row[:-1] + (words != new), row[1:] + 1)])
        row = np.minimum.accumulate(changed - steps) + steps
        different.append(int(row[-1]))
    return different
