"""Where the blocks of a picture go: in layers from top to bottom, so that few edges cross and most are straight.

The method of Sugiyama: blocks get layers, edges that pass a layer get a bend in it, each layer is put into an order by
where its neighbours are, and then everything moves as near to what it is connected with as that order lets it.
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
    bends: dict[Edge, range] = {}
    for source, target in edges:
        between = range(layer_of[source] + 1, layer_of[target])
        bends[source, target] = range(len(layer_of), len(layer_of) + len(between))
        layer_of += between
    half = [width / 2 for width, _ in sizes] + [_BEND] * (len(layer_of) - len(sizes))
    near: list[list[int]] = [[] for _ in layer_of]
    for (source, target), between in bends.items():
        for upper, lower in pairwise([source, *between, target]):
            near[upper].append(lower)
            near[lower].append(upper)
    layers = [
        [item for item, own in enumerate(layer_of) if own == layer] for layer in range(max(layer_of, default=-1) + 1)
    ]
    xs = _columns(_order_layers(layers, near), near, half, len(sizes))
    left = min((x - width for x, width in zip(xs, half, strict=True)), default=0.0)
    xs = [x - left for x in xs]
    heights = [max((sizes[item][1] for item in layer if item < len(sizes)), default=0.0) for layer in layers]
    tops = [0.0, *accumulate(height + _LAYER_GAP for height in heights)]
    centres = [(xs[i], tops[layer_of[i]] + heights[layer_of[i]] / 2) for i in range(len(sizes))]
    routes = {}
    for source, target in edges:
        start = (centres[source][0], centres[source][1] + sizes[source][1] / 2)
        end = (centres[target][0], centres[target][1] - sizes[target][1] / 2)
        passed = [
            (xs[i], tops[layer_of[i]] + down) for i in bends[source, target] for down in (0, heights[layer_of[i]])
        ]
        routes[source, target] = [start, *passed, end]
    width = max((x + wide for x, wide in zip(xs, half, strict=True)), default=0.0)
    return Layout(centres, routes, width, tops[-1] - _LAYER_GAP)


def _layers(count: int, edges: Sequence[Edge]) -> list[int]:
    """Every block below those that it reads, and what reads nothing just above the first that goes on from it."""
    before: list[list[int]] = [[source for source, target in edges if target == block] for block in range(count)]
    after: list[list[int]] = [[target for source, target in edges if source == block] for block in range(count)]
    order: dict[int, int] = {}
    while len(order) < count:
        waiting = [block for block in range(count) if block not in order]
        # A circle, which a sound model does not have, is entered at its first block.
        ready = next((block for block in waiting if all(source in order for source in before[block])), waiting[0])
        order[ready] = len(order)
    layers = [0] * count
    for first_time in (True, False):
        for block in order:
            above = [layers[source] for source in before[block] if order[source] < order[block]]
            layers[block] = max(above) + 1 if above else layers[block]
        for block in order if first_time else ():
            if not before[block] and after[block]:
                following = [target for target in after[block] if after[target]] or after[block]
                layers[block] = max(min(layers[target] for target in following) - 1, 0)
    return layers


def _order_layers(layers: list[list[int]], near: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each layer in an order in which few edges cross: by the mean of where neighbours are, downwards and upwards."""
    best, fewest = layers, _crossings(layers, near)
    place = {item: i for layer in layers for i, item in enumerate(layer)}
    for i in range(_ORDERINGS):
        layers = [list(layer) for layer in layers]
        for number in range(len(layers)) if i % 2 == 0 else reversed(range(len(layers))):
            beside = set(layers[number - 1] if number else ()) if i % 2 == 0 else set(*layers[number + 1 : number + 2])
            means = {}
            for item in layers[number]:
                places = [place[other] for other in near[item] if other in beside]
                means[item] = sum(places) / len(places) if places else place[item]
            layers[number].sort(key=lambda item: means[item])
            place |= {item: at for at, item in enumerate(layers[number])}
        if (count := _crossings(layers, near)) < fewest:
            best, fewest = layers, count
    return best


def _crossings(layers: Sequence[Sequence[int]], near: Sequence[Sequence[int]]) -> int:
    count = 0
    for upper, lower in pairwise(layers):
        place = {item: at for at, item in enumerate(lower)}
        ends: list[int] = []
        for item in upper:
            own = [place[other] for other in near[item] if other in place]
            count += sum(end > mine for mine in own for end in ends)
            ends += own
    return count


def _columns(
    layers: Sequence[Sequence[int]], near: Sequence[Sequence[int]], half: Sequence[float], blocks: int
) -> list[float]:
    """Where everything is from left to right, as near to what it is connected with as orders and widths let it."""
    distances = [
        [half[a] + half[b] + (_GAP if max(a, b) < blocks else _EDGE_GAP) for a, b in pairwise(layer)]
        for layer in layers
    ]
    xs = [0.0] * len(half)
    for layer, apart in zip(layers, distances, strict=True):
        for item, x in zip(layer, accumulate(apart, initial=-sum(apart) / 2), strict=True):
            xs[item] = x
    for i in range(_SWEEPS):
        close = (_FAR * (_NEAR / _FAR) ** (i / _SWEEPS)) ** 2
        sweep = list(zip(layers, distances, strict=True))
        for layer, apart in sweep if i % 2 else reversed(sweep):
            wanted = []
            for item in layer:  # edges that are nearly straight matter most: they should get straight
                pulls = [(xs[other], 1 / ((xs[other] - xs[item]) ** 2 + close)) for other in near[item]]
                total = sum(pull for _, pull in pulls)
                wanted.append((sum(x * pull for x, pull in pulls) / total, total) if pulls else (xs[item], 1e-9))
            for item, x in zip(layer, _nearest(wanted, apart), strict=True):
                xs[item] = x
    return xs


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
