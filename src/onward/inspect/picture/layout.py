"""Where the blocks of a picture go: in layers from top to bottom, in columns that the library igraph chooses.

It orders each layer so that few edges cross, and puts what belongs together straight below one another. It knows points
only: blocks of different sizes move together afterwards.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from onward.errors import UnsupportedError

_GAP, _EDGE_GAP, _LAYER_GAP = 26.0, 14.0, 36.0
_BEND = 4.0
_SWEEPS, _FAR, _NEAR = 200, 400.0, 4.0

Point = tuple[float, float]
Edge = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The middle of each block, and the points of each edge, which curves between layers and passes a layer upright."""

    centres: list[Point]
    routes: dict[Edge, list[Point]]
    width: float
    height: float


def arrange(sizes: Sequence[Point], edges: Iterable[Edge]) -> Layout:
    """Lay out blocks of these sizes (width, height)."""
    edges = list(edges)
    layers = _layers(len(sizes), edges)
    grid = _Grid(sizes, layers, [edge for edge in edges if layers[edge[0]] < layers[edge[1]]])
    grid.settle()
    tops, heights = _rows(sizes, layers)
    xs = grid.positions()
    centres = [(xs[i], tops[layer] + heights[layer] / 2) for i, layer in enumerate(layers)]
    routes = {}
    for source, target in edges:
        start = (centres[source][0], centres[source][1] + sizes[source][1] / 2)
        end = (centres[target][0], centres[target][1] - sizes[target][1] / 2)
        bends = []
        for layer, bend in enumerate(grid.bends.get((source, target), ()), layers[source] + 1):
            bends += [(xs[bend], tops[layer]), (xs[bend], tops[layer] + heights[layer])]
        routes[source, target] = [start, *bends, end]
    return Layout(centres, routes, grid.width(), tops[-1] - _LAYER_GAP)


def _layers(count: int, edges: Sequence[Edge]) -> list[int]:
    """Every block below those that it reads, and what reads nothing just above the first that goes on from it."""
    after: list[list[int]] = [[] for _ in range(count)]
    before: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        after[source].append(target)
        before[target].append(source)
    layers = _longest_paths(after, [len(sources) for sources in before])
    for block in range(count):
        if not before[block] and after[block]:
            following = [target for target in after[block] if after[target]] or after[block]
            layers[block] = max(min(layers[target] for target in following) - 1, 0)
    for block in range(count):
        if before[block] and not after[block]:
            layers[block] = max(layers[source] for source in before[block]) + 1
    return layers


def _longest_paths(after: Sequence[Sequence[int]], missing: list[int]) -> list[int]:
    """How many blocks are before each one; `missing` counts those that have not been placed."""
    count = len(after)
    layers = [0] * count
    waiting = dict.fromkeys(range(count))
    ready = [i for i in waiting if not missing[i]]
    while waiting:
        # A circle, which a sound model does not have, is entered at its first block.
        block = ready.pop() if ready else next(iter(waiting))
        if block not in waiting:
            continue
        del waiting[block]
        for target in after[block]:
            if target in waiting:
                layers[target] = max(layers[target], layers[block] + 1)
                missing[target] -= 1
                if not missing[target]:
                    ready.append(target)
    return layers


def _rows(sizes: Sequence[Point], layers: Sequence[int]) -> tuple[list[float], list[float]]:
    """Where each layer begins, and how high it is."""
    heights = [0.0] * (max(layers, default=0) + 1)
    for layer, (_, height) in zip(layers, sizes, strict=True):
        heights[layer] = max(heights[layer], height)
    tops = [0.0]
    for height in heights:
        tops.append(tops[-1] + height + _LAYER_GAP)
    return tops, heights


class _Grid:
    """Blocks, and the bends of edges that pass a layer, in the order that they have in their layer."""

    def __init__(self, sizes: Sequence[Point], layers: Sequence[int], edges: Sequence[Edge]):
        self.bends: dict[Edge, list[int]] = {}
        layer_of = list(layers)
        for source, target in edges:
            between = range(layers[source] + 1, layers[target])
            self.bends[source, target] = list(range(len(layer_of), len(layer_of) + len(between)))
            layer_of += between
        self._is_block = [item < len(sizes) for item in range(len(layer_of))]
        self._half = [width / 2 for width, _ in sizes] + [_BEND] * (len(layer_of) - len(sizes))
        self._near: list[list[int]] = [[] for _ in layer_of]
        self._links = [pair for (a, b), bends in self.bends.items() for pair in pairwise([a, *bends, b])]
        for upper, lower in self._links:
            self._near[upper].append(lower)
            self._near[lower].append(upper)
        self._x = self._places(layer_of)
        self._layers: list[list[int]] = [[] for _ in range(max(layer_of, default=-1) + 1)]
        for item in sorted(range(len(layer_of)), key=lambda i: self._x[i]):
            self._layers[layer_of[item]].append(item)

    def _places(self, layers: Sequence[int]) -> list[float]:
        """Where igraph puts everything, in columns as wide as the widest block."""
        graph = _igraph().Graph(n=len(layers), edges=self._links, directed=True)
        wide = 2 * max(self._half, default=0.0) + _GAP
        return [x for x, _ in graph.layout_sugiyama(layers=list(layers), hgap=wide, maxiter=200)]

    def settle(self) -> None:
        """Move everything as near to what it is connected with as the order and the widths of blocks let it."""
        for i in range(_SWEEPS):
            near = _FAR * (_NEAR / _FAR) ** (i / _SWEEPS)
            for layer in self._layers if i % 2 else reversed(self._layers):
                wanted = [self._wanted(item, near) for item in layer]
                distances = [self._distance(left, right) for left, right in pairwise(layer)]
                for item, x in zip(layer, _nearest(wanted, distances), strict=True):
                    self._x[item] = x

    def _wanted(self, item: int, near: float) -> tuple[float, float]:
        """Where it would be best, and how much that matters: edges that are nearly straight should get straight."""
        pulls = [(self._x[other], 1 / ((self._x[other] - self._x[item]) ** 2 + near**2)) for other in self._near[item]]
        total = sum(pull for _, pull in pulls)
        return (sum(x * pull for x, pull in pulls) / total, total) if pulls else (self._x[item], 1e-9)

    def _distance(self, left: int, right: int) -> float:
        gap = _GAP if self._is_block[left] and self._is_block[right] else _EDGE_GAP
        return self._half[left] + gap + self._half[right]

    def positions(self) -> list[float]:
        left = min((x - half for x, half in zip(self._x, self._half, strict=True)), default=0.0)
        return [x - left for x in self._x]

    def width(self) -> float:
        return max((x + half for x, half in zip(self.positions(), self._half, strict=True)), default=0.0)


def _nearest(wanted: Sequence[tuple[float, float]], distances: Sequence[float]) -> list[float]:
    """The positions nearest to the wanted ones (least squares by weight) that keep the order and the distances."""
    offsets = [0.0, *accumulate(distances)]
    pools: list[tuple[float, float, int]] = []  # mean, weight, length: neighbours that have met move as one
    for (x, weight), offset in zip(wanted, offsets, strict=False):
        mean, total, length = x - offset, weight, 1
        while pools and pools[-1][0] >= mean:
            other, heavy, long = pools.pop()
            mean, total, length = (mean * total + other * heavy) / (total + heavy), total + heavy, length + long
        pools.append((mean, total, length))
    means = [mean for mean, _, length in pools for _ in range(length)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=False)]


def _igraph() -> Any:
    try:
        return importlib.import_module("igraph")
    except ImportError:
        hint = "pip install 'onward[draw]'"
        raise UnsupportedError("drawing needs igraph, which is not installed", hint=hint) from None
