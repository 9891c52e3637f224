"""Search for the blocks in a sequence of operators that repeats itself.

Candidate cuts come from equal operators and from the names of parameters. The best cut gives the
shortest description: one block, the differences of the others from it, the changes from block to
block, and the operators outside of blocks. A cut is good where few values cross it. Values that are
read soon after a cut count against it, except for one.
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
"""Cost of a cut, of a word that changes from one block to the next, of a word between blocks."""
_EXCESS_COST, _LONG_COST = 3.0, 0.25
"""Cost of a cut that several soon-read values cross, and of each value that is read later."""
_NAMES_PREFERRED = 0.6
_MOST_DIFFERENT, _MOST_DIFFERENT_BESIDE = 0.5, 0.3
"""Largest difference between blocks, relative to their length; the smaller one without a suggested cut."""
_MOST_LEFT, _MOST_LEFT_INSIDE = 0.9, 0.7
"""Largest cost of a description by blocks, relative to the length of a row, and of a block."""
_GRAMS = 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64
"""Numbers of words that are compared to recognize a position."""
_DEPTHS = range(1, 5)
"""Numbers in a name that are compared: the first, the first two, and so on."""
_MOST_RUNS = 200
_NUMBER = re.compile(r"\d+")

Words = tuple[int, ...]
"""Operators as integers; odd for operators that read parameters."""


@dataclasses.dataclass(frozen=True)
class OperatorRow:
    """Operators in their order."""

    words: Sequence[Hashable]
    """Key of each computation, without sizes."""
    details: Sequence[Hashable]
    """Key of each computation, with the sizes of its parameters."""
    reads_parameters: Sequence[bool]
    paths: Sequence[str]
    """Name of the first parameter that each reads and no other operator reads; else empty."""
    lives: Sequence[tuple[int, int]]
    """Indices of the producer and of the last reader of each value."""


class Span(NamedTuple):
    """A block: `row[start:end]`."""

    start: int
    end: int


def find_spans(row: OperatorRow) -> list[Span]:
    """Return the blocks of a row in order, without overlap; at least two, or none."""
    finder = _Finder(row)
    spans, by_name = finder.best(0, len(row.words))
    if not spans:
        return []
    least = sum(end - start for start, end in spans) / len(spans) / 2
    for start, end in list(_gaps(spans, len(row.words))):
        spans_in_gap, _ = finder.best(start, end)
        spans += spans_in_gap if spans_in_gap and min(span.end - span.start for span in spans_in_gap) >= least else []
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
        """At each index, the last readers of the values that cross it."""
        for producer, last_reader in row.lives:
            for i in range(producer + 1, last_reader + 1):
                self._crossing[i].append(last_reader)

    def best(self, start: int, end: int) -> tuple[list[Span], bool]:
        """Return the cheapest blocks in a range, if cheap enough, and True if found by name."""
        lowest, best, by_name = _MOST_LEFT * (end - start), list[Span](), False
        for cuts in self._cuts_by_name(start, end):
            cost, spans = self._evaluate(cuts, start, end, lowest / _NAMES_PREFERRED)
            if cost * _NAMES_PREFERRED < lowest and len(spans) > 1:
                lowest, best, by_name = cost * _NAMES_PREFERRED, spans, True
        for cuts in self._cuts_by_words(start, end):
            cost, spans = self._evaluate(cuts, start, end, lowest)
            if cost < lowest and len(spans) > 1 and not self._repeats_itself(spans):
                lowest, best, by_name = cost, spans, False
        return best, by_name

    def _repeats_itself(self, spans: Sequence[Span]) -> bool:
        """True if a block of median length consists of smaller blocks."""
        start, end = sorted(spans, key=lambda span: span.end - span.start)[len(spans) // 2]
        words = self._words[start:end]
        if words not in self._repeating:
            limit = _MOST_LEFT_INSIDE * (end - start)
            evaluations = (
                self._evaluate(cuts, start, end, limit, excess=0) for cuts in self._cuts_by_words(start, end)
            )
            self._repeating[words] = any(cost < limit and len(inner) > 1 for cost, inner in evaluations)
        return self._repeating[words]

    # ---- the last touches --------------------------------------------------------------------------------------------

    def trim(self, spans: list[Span]) -> list[Span]:
        """Cut the end off blocks that begin like a shorter block."""
        words = [self._words[start:end] for start, end in spans]
        trimmed = []
        for (start, end), whole in zip(spans, words, strict=True):
            shorter = max((len(other) for other in words if other == whole[: len(other)] and other != whole), default=0)
            is_narrow = shorter and len(self._crossing[start + shorter]) <= 1
            trimmed.append(Span(start, start + shorter if is_narrow else end))
        return trimmed

    def merge_pairs(self, spans: list[Span]) -> list[Span]:
        """Merge alternating blocks of two kinds, such as self-attention and cross-attention."""
        merged: list[Span] = []
        while spans:
            count = self._turns(spans) // 2 * 2
            merged += [Span(spans[i].start, spans[i + 1].end) for i in range(0, count, 2)] or spans[:1]
            spans = spans[max(count, 1) :]
        return merged

    def _turns(self, spans: Sequence[Span]) -> int:
        """Return the number of first blocks that alternate; 0 if none of them are equal."""
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
        """Yield cuts where the first number in the names changes, or one of the first two ..."""
        for depth in _DEPTHS:
            cuts, last_named, key = [], start - 1, ""
            for i in range(start, end):
                if self._paths[i]:
                    new = _container(self._paths[i], depth)
                    if new != key:
                        gap = range(last_named + 1, i + 1)
                        cuts.append(min(gap, key=lambda cut: (max(len(self._crossing[cut]), 1), -cut)))
                    last_named, key = i, new
            if len(cuts) > 1:
                yield cuts

    def _cuts_by_words(self, start: int, end: int) -> list[list[int]]:
        """Return cuts where the same words follow and few values cross."""
        narrow = [at for at in range(start, end) if self._is_narrow(at, start, end)]
        candidates: dict[tuple[int, ...], None] = {}
        for length in _GRAMS:
            positions: dict[Words, list[int]] = {}
            for at in narrow:
                positions.setdefault(self._words[at : min(at + length, end)], []).append(at)
            for group in positions.values():
                widths = sorted({len(self._crossing[at]) for at in group})
                for width in {*widths[:2], widths[-1]}:
                    candidates[tuple(at for at in group if len(self._crossing[at]) <= width)] = None
        cuts = [list(positions) for positions in candidates if len(positions) > 1]
        runs = [
            positions for positions in cuts if len({self._words[a:b] for a, b in itertools.pairwise(positions)}) == 1
        ]
        both = [a + b for a, b in itertools.product(runs, runs) if a[-1] < b[0]]  # an encoder, and a decoder
        return cuts + both[:_MOST_RUNS]

    def _is_narrow(self, at: int, start: int, end: int) -> bool:
        """True if more values cross the next index, or no fewer the previous one."""
        before, here, after = (len(self._crossing[position]) for position in (at - 1, at, min(at + 1, end - 1)))
        return at == start or here < after or here <= before

    # ---- what they cost ----------------------------------------------------------------------------------------------

    def _evaluate(
        self, cuts: Sequence[int], start: int, end: int, most: float, excess: float = _EXCESS_COST
    ) -> tuple[float, list[Span]]:
        """Return the cost of a row with these cuts, and its blocks; none above the cost `most`."""
        pieces = [self._words[a:b] for a, b in zip(cuts, [*cuts[1:], end], strict=True)]
        counts = Counter(pieces)
        models = [model for model in _models(counts) if _least_cost(model, counts) < most]
        if not models:
            return most, []
        described = ((*_describe(model, counts), model) for model in models)
        cost, lengths, model = min(described, key=lambda description: description[0])
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
        """Yield the cost of the differences from one block to the next."""
        words = [self._words[start:end] for start, end in spans]
        return (_CHANGE_COST * _differences(a, b)[-1] for a, b in itertools.pairwise(words) if a != b)

    def _handing_on(self, spans: Sequence[Span], end: int, excess: float) -> Iterator[float]:
        """Yield the cost of the values that cross each cut."""
        cuts = sorted({cut for span in spans for cut in span if cut < end})
        for at, following in itertools.pairwise([*cuts, end]):
            soon = sum(read < following for read in self._crossing[at])
            yield _BLOCK_COST + excess * (soon > 1) + _LONG_COST * (len(self._crossing[at]) - soon)


def _container(path: str, depth: int) -> str:
    """Return `encoder.layer.3` for `encoder.layer.3.norm1.weight` at depth 1."""
    numbers = list(_NUMBER.finditer(path))
    return path[: numbers[depth - 1].end()] if len(numbers) >= depth else path.rpartition(".")[0] or path


def _models(counts: Counter[Words]) -> list[Words]:
    """Return candidates for the typical block: the most common pieces, and those of median length."""
    by_length = sorted(counts, key=len)
    middle = len(by_length) // 2
    return list(dict.fromkeys([piece for piece, _ in counts.most_common(2)] + by_length[middle : middle + 2]))


def _least_cost(model: Words, counts: Counter[Words]) -> int:
    """Return a lower bound of the cost of a description, from counts of words alone: fast."""
    expected, cost = Counter(model), len(model)
    for piece in counts:
        if len(piece) < 1.5 * len(model):  # a longer one may be several
            piece_counts = Counter(piece)
            cost += min(len(piece), max((expected - piece_counts).total(), (piece_counts - expected).total()))
    return cost


def _describe(model: Words, counts: Counter[Words]) -> tuple[float, dict[Words, list[int]]]:
    """Return the cost of a description by `model`, and the lengths of the blocks in each piece."""
    cost, lengths = float(len(model)), {}
    for piece, count in counts.items():
        lengths[piece], different = _split(piece, model)
        cost += different + _GAP_COST * count * (len(piece) - sum(lengths[piece]))
    return cost, lengths


@functools.lru_cache(4096)
def _split(piece: Words, model: Words) -> tuple[list[int], int]:
    """Return the lengths of the blocks at the start of a piece, and their number of differences."""
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
    """Return the length of a block like `model` at the start of a piece, and the differences."""
    different = _differences(piece[: 2 * len(model) + 1], model)
    end = min(range(len(different)), key=lambda n: (different[n] - n, different[n]))
    return (end, different[end]) if end > 1 and _are_alike(piece[:end], model, most) else (0, 0)


def _are_alike(a: Words, b: Words, most: float = _MOST_DIFFERENT_BESIDE) -> bool:
    """True if few words differ, and few of those that read parameters."""
    a_reads, b_reads = (tuple(word for word in words if word % 2) for words in (a, b))
    is_near = _differences(a, b)[-1] <= most * max(len(a), len(b))
    return is_near and _differences(a_reads, b_reads)[-1] < most * max(len(a_reads), len(b_reads), 1)


@functools.lru_cache(4096)
def _differences(piece: Words, model: Words) -> list[int]:
    """Return the edit distance of the model to the first 0, 1, 2 ... words of a piece."""
    words, steps = np.array(model), np.arange(len(model) + 1)
    row = steps
    different = [len(model)]
    for new in piece:
        changed = np.concatenate([row[:1] + 1, np.minimum(row[:-1] + (words != new), row[1:] + 1)])
        row = np.minimum.accumulate(changed - steps) + steps
        different.append(int(row[-1]))
    return different
