"""Where the blocks of a picture go: in layers from top to bottom, each as near to its neighbours as it can be.

An edge that passes a layer has a bend in it, which takes its place among the blocks there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

_GAP, _EDGE_GAP, _LAYER_GAP, _BEND = 26.0, 14.0, 36.0, 4.0
_ORDERINGS, _SWEEPS, _FAR, _NEAR = 24, 200, 400.0, 4.0

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
    layer_of = _layers(len(sizes), edges)
    half = [width / 2 for width, _ in sizes]
    near: list[list[int]] = [[] for _ in sizes]
    bends: dict[Edge, range] = {}
    for source, target in edges:
        passed = range(layer_of[source] + 1, layer_of[target])
        bends[source, target] = range(len(layer_of), len(layer_of) + len(passed))
        layer_of += passed
        half += [_BEND] * len(passed)
        near += [[] for _ in passed]
        for upper, lower in pairwise([source, *bends[source, target], target]):
            near[upper].append(lower)
            near[lower].append(upper)
    layers = [[item for item, own in enumerate(layer_of) if own == layer] for layer in sorted(set(layer_of))]
    xs = _columns(layers, near, half)
    heights = [max(sizes[item][1] for item in layer if item < len(sizes)) for layer in layers]
    tops = [0.0, *accumulate(height + _LAYER_GAP for height in heights)]
    centres = [(xs[i], tops[layer_of[i]] + heights[layer_of[i]] / 2) for i in range(len(sizes))]
    routes = {}
    for source, target in edges:
        start = (centres[source][0], centres[source][1] + sizes[source][1] / 2)
        end = (centres[target][0], centres[target][1] - sizes[target][1] / 2)
        between = bends[source, target]
        upright = [(xs[i], tops[layer_of[i]] + down) for i in between for down in (0, heights[layer_of[i]])]
        routes[source, target] = [start, *upright, end]
    width = max((x + wide for x, wide in zip(xs, half, strict=True)), default=0.0)
    return Layout(centres, routes, width, tops[-1] - _LAYER_GAP)


def _layers(count: int, edges: Sequence[Edge]) -> list[int]:
    """Every block below those that it reads, and what reads nothing just above the first that goes on from it."""
    layers = _below(edges, [0] * count)
    reading, giving = {target for _, target in edges}, {source for source, _ in edges}
    for block in giving - reading:
        targets = [target for source, target in edges if source == block]
        layers[block] = min(layers[target] for target in [t for t in targets if t in giving] or targets) - 1
    layers = _below(edges, layers)
    number = {layer: i for i, layer in enumerate(sorted(set(layers)))}
    return [number[layer] for layer in layers]


def _below(edges: Sequence[Edge], layers: list[int]) -> list[int]:
    """The layers, with each block as far down as what it reads demands; a circle, which no sound model has, ends."""
    for _ in layers:
        for source, target in edges:
            layers[target] = max(layers[target], min(layers[source] + 1, len(layers)))
    return layers


def _columns(layers: list[list[int]], near: Sequence[Sequence[int]], half: Sequence[float]) -> list[float]:
    """Where everything is from left to right: first in which order, then how near to its neighbours that lets it be."""
    xs = [0.0] * len(half)
    for layer in layers:
        _move(layer, [(0.0, 1.0)] * len(layer), xs, half)
    candidates = []
    for i in range(_ORDERINGS):
        for before, layer in pairwise(layers[:: -1 if i % 2 else 1]):
            places = {item: [xs[other] for other in near[item] if other in before] or [xs[item]] for item in layer}
            means = {item: sum(found) / len(found) for item, found in places.items()}
            layer.sort(key=means.__getitem__)
            _move(layer, [(means[item], 1.0) for item in layer], xs, half)
        length = sum(abs(xs[item] - xs[other]) for item, others in enumerate(near) for other in others)
        candidates.append((length, [list(layer) for layer in layers], list(xs)))
    _, layers, xs = min(candidates)
    for i in range(_SWEEPS):
        close = (_FAR * (_NEAR / _FAR) ** (i / _SWEEPS)) ** 2
        for layer in layers[:: 1 if i % 2 else -1]:
            wanted = []
            for item in layer:  # edges that are nearly straight matter most: they should get straight
                pulls = [(xs[other], 1 / ((xs[other] - xs[item]) ** 2 + close)) for other in near[item]]
                total = sum(pull for _, pull in pulls)
                wanted.append((sum(x * pull for x, pull in pulls) / total, total) if pulls else (xs[item], 1e-9))
            _move(layer, wanted, xs, half)
    left = min((x - width for x, width in zip(xs, half, strict=True)), default=0.0)
    return [x - left for x in xs]


def _move(layer: Sequence[int], wanted: Sequence[Point], xs: list[float], half: Sequence[float]) -> None:
    """Move a layer to where it is wanted (position, weight), by least squares, with its order and distances kept."""
    apart = [half[a] + half[b] + (_EDGE_GAP if _BEND in (half[a], half[b]) else _GAP) for a, b in pairwise(layer)]
    offsets = list(accumulate(apart, initial=0.0))
    pools: list[tuple[float, float, int]] = []  # mean, weight, length: neighbours that have met move as one
    for (x, weight), offset in zip(wanted, offsets, strict=True):
        mean, total, length = x - offset, weight, 1
        while pools and pools[-1][0] >= mean:
            other, heavy, long = pools.pop()
            mean, total, length = (mean * total + other * heavy) / (total + heavy), total + heavy, length + long
        pools.append((mean, total, length))
    means = [mean for mean, _, length in pools for _ in range(length)]
    for item, mean, offset in zip(layer, means, offsets, strict=True):
        xs[item] = mean + offset
