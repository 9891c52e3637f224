"""Pictures of a model and its training: self-contained SVG files, for light and dark backgrounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from html import escape  # not that of xml.sax, which imports http and ssl
from itertools import accumulate, pairwise

from rich.cells import cell_len

from onward.inspect.blocks import Box, Picture
from onward.inspect.description import describe
from onward.inspect.formatting import clean, shorten
from onward.model import Source, load
from onward.run_state.reading import blame_model


def draw(source: Source, step: int = 0) -> str:
    """Return a picture of a step: forward pass, loss, gradients, update and state. An inference
    model has its graph alone.

    Returns:
        A self-contained SVG file. Long graphs are folded by the names of their nodes.
    """
    model = load(source)
    if model.steps or step:
        model.step(step)
    summary = describe(model)
    index = step % len(model.steps) if model.steps else None
    with blame_model():
        picture = Picture(model, summary, index)
    several = index is not None and len(model.steps) > 1
    return write_svg(picture, f"{summary.name}, step {index}" if several else summary.name)


# ---- look ------------------------------------------------------------------------------------------------------------

_MARGIN, _PADDING, _MARK = 24.0, 11.0, 10.0
_BASE, _ROW_HEIGHT, _HEADER, _LEAST_WIDTH = 17.0, 14.0, 34.0, 460.0
_NAME_LETTER, _TITLE_LETTER, _ROW_LETTER = 9.4, 7.8, 6.1
_MOST_NAME, _MOST_TITLE, _MOST_ROW = 80, 36, 44

# Meaning of each style of block; fill and line on light and on dark backgrounds.
_STYLES = {
    "input": ("input", "#f3f4f6", "#7c8591", "#22272e", "#8b949e"),
    "inference": ("inference", "#e5f0fc", "#3f7fc4", "#12263d", "#5b9be0"),
    "training": ("forward pass in training mode", "#dff5f1", "#238b7b", "#0d2b27", "#3fb9a6"),
    "loss": ("loss", "#fde8e8", "#cc4b4f", "#3a1618", "#ea7377"),
    "gradient": ("gradient", "#efe7fb", "#7f57c2", "#261a3d", "#a988e6"),
    "update": ("clipping, sums and scaling of gradients", "#fdf3e3", "#c98a2b", "#33240c", "#dba24b"),
    "schedule": ("schedule", "#f8f6dc", "#9a8a1c", "#2b280c", "#c3b44a"),
    "optimizer": ("optimizer", "#fce0bd", "#bf6f0e", "#40280a", "#ef9f3c"),
    "state": ("state", "#e3f4e3", "#3f9142", "#12301a", "#5cb862"),
    "output": ("output", "#f3f4f6", "#7c8591", "#22272e", "#8b949e"),
    "metric": ("metric", "#ffffff", "#7c8591", "#161b22", "#8b949e"),
}
_MARKS = {
    "trained": ("#2f8f3a", "#5cc869"),
    "trainable": ("#2f8f3a", "#5cc869"),
    "frozen": ("#5b7fa8", "#8fb3dd"),
    "statistics": ("#a08a2a", "#d0bb55"),
}
_PAPERS = (("#ffffff", "#1f2328", "#9aa4af"), ("#0d1117", "#e6edf3", "#6e7681"))
_LOOK = {
    "text": "font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif",
    ".name": "font-size:15px;font-weight:600",
    ".title": "font-size:12px;font-weight:600;text-anchor:middle",
    ".row": "font-size:10.5px",
    ".middle": "text-anchor:middle",
    ".block": "stroke-width:1.2",
    ".block.state": "stroke-dasharray:4 2.5",
    ".edge": "fill:none;stroke-width:1.2",
    ".edge:hover": "stroke-width:3",
    "g:hover>.block": "stroke-width:2.4",
}


_ARROW = (
    '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" orient="auto" markerWidth="7" markerHeight="7">'
    '<path d="M0 0.5 L8 4 L0 7.5 z" class="head"/></marker>'
)


def write_svg(picture: Picture, name: str) -> str:
    """Return the file. All its text goes through `clean`, and is escaped."""
    layout = arrange([_size(block) for block in picture.blocks], picture.edges)
    legend, legend_width, legend_height = _legend(picture, max(layout.width, _LEAST_WIDTH))
    heading = shorten(name, _MOST_NAME)
    width = max(layout.width, legend_width, cell_len(heading) * _NAME_LETTER) + 2 * _MARGIN
    top = _MARGIN + _HEADER + legend_height
    style = _rules(_LOOK) + _rules(_colors(0)) + f"@media (prefers-color-scheme:dark){{{_rules(_colors(1))}}}"
    look = f'role="img" class="onward" width="{width:.0f}" style="max-width:100%;height:auto"'
    view = f'viewBox="0 0 {width:.0f} {top + layout.height + _MARGIN:.0f}"'
    edges = [
        f'<path class="edge" d="{_curve(layout.routes[edge])}" marker-end="url(#arrow)">{_title(names)}</path>'
        for edge, names in picture.edges.items()
    ]
    blocks = [_block(block, center) for block, center in zip(picture.blocks, layout.centers, strict=True)]
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {look} {view}>{_title([name])}',
        f'<style>{escape(style, quote=False)}</style><rect class="paper" width="100%" height="100%"/>{_ARROW}',
        _text(heading, _MARGIN, _MARGIN + 12, "name"),
        _group(_MARGIN, _MARGIN + _HEADER - 8, legend),
        _group((width - layout.width) / 2, top, [*edges, *blocks]),
        "</svg>\n",
    ]
    return "\n".join(elements)


def _size(block: Box) -> Point:
    """Return width and height: a generous estimate, as fonts differ."""
    margin = _MARK if _has_marks(block) else 0.0
    widths = [cell_len(shorten(block.title, _MOST_TITLE)) * _TITLE_LETTER]
    widths += [cell_len(shorten(text, _MOST_ROW)) * _ROW_LETTER + margin for _, text in block.rows]
    return max(widths) + 2 * _PADDING, _BASE + _ROW_HEIGHT * len(block.rows) + 10


def _has_marks(block: Box) -> bool:
    return any(mark for mark, _ in block.rows)


def _legend(picture: Picture, width: float) -> tuple[list[str], float, float]:
    """Return the elements of a legend of the colors that occur, its width and its height."""
    used = {block.style for block in picture.blocks} | {mark for block in picture.blocks for mark, _ in block.rows}
    items, x, y, widest = [], 0.0, 12.0, 0.0
    meanings = {**{style: look[0] for style, look in _STYLES.items()}, **{mark: mark for mark in _MARKS}}
    for style, meaning in meanings.items():
        if style not in used:
            continue
        needed = 34 + len(meaning) * _ROW_LETTER
        if x and x + needed > width:
            x, y = 0.0, y + 18
        dot = f'<circle class="mark {style}" cx="6.5" cy="-3.5" r="3.5"/>'
        box = f'<rect class="block {style}" y="-9" width="13" height="11" rx="3"/>'
        items.append(_group(x, y, [dot if style in _MARKS else box, _text(meaning, 18, 0, "row")]))
        x += needed
        widest = max(widest, x)
    return items, widest, y + 18


def _block(block: Box, center: Point) -> str:
    width, height = _size(block)
    corner = height / 2 if block.style in ("input", "output", "metric") else 5.0
    left, style = (_PADDING + _MARK, "row") if _has_marks(block) else (width / 2, "row middle")
    elements = [
        _title([block.title, *block.notes]),
        f'<rect class="block {block.style}" width="{width:.1f}" height="{height:.1f}" rx="{corner:.1f}"/>',
        _text(shorten(block.title, _MOST_TITLE), width / 2, _BASE, "title"),
    ]
    for i, (mark, text) in enumerate(block.rows, 1):
        base = _BASE + _ROW_HEIGHT * i
        elements.append(_text(shorten(text, _MOST_ROW), left, base, style))
        if mark:
            elements.append(f'<circle class="mark {mark}" cx="{_PADDING + 3:.1f}" cy="{base - 3.5:.1f}" r="3"/>')
    return _group(center[0] - width / 2, center[1] - height / 2, elements)


def _curve(route: Sequence[Point]) -> str:
    """Return a path that curves between layers and is straight through them."""
    steps = [f"M{route[0][0]:.1f} {route[0][1]:.1f}"]
    for i, ((x0, y0), (x1, y1)) in enumerate(pairwise(route)):
        half = (y1 - y0) / 2
        curve = f"C{x0:.1f} {y0 + half:.1f} {x1:.1f} {y1 - half:.1f} {x1:.1f} {y1:.1f}"
        steps.append(curve if i % 2 == 0 else f"L{x1:.1f} {y1:.1f}")
    return "".join(steps)


def _colors(paper: int) -> dict[str, str]:
    ground, ink, line = _PAPERS[paper]
    rules = {".paper": f"fill:{ground}", "text": f"fill:{ink}", ".edge": f"stroke:{line}", ".head": f"fill:{line}"}
    rules |= {f".block.{k}": f"fill:{v[1 + 2 * paper]};stroke:{v[2 + 2 * paper]}" for k, v in _STYLES.items()}
    return rules | {f".mark.{mark}": f"fill:{colors[paper]}" for mark, colors in _MARKS.items()}


def _rules(rules: Mapping[str, str]) -> str:
    """Return CSS that applies to this picture only, also inside a page."""
    return "".join(f".onward {selector}{{{look}}}" for selector, look in rules.items())


def _group(x: float, y: float, content: Iterable[str]) -> str:
    return f'<g transform="translate({x:.1f} {y:.1f})">{"".join(content)}</g>'


def _title(lines: Iterable[str]) -> str:
    return f"<title>{escape(chr(10).join(map(clean, lines)), quote=False)}</title>"


def _text(text: str, x: float, y: float, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{escape(text, quote=False)}</text>'


# ---- layout ----------------------------------------------------------------------------------------------------------


_GAP, _EDGE_GAP, _LAYER_GAP, _BEND = 26.0, 14.0, 36.0, 4.0
_ORDERINGS, _SWEEPS, _FAR, _NEAR = 24, 200, 400.0, 4.0

Point = tuple[float, float]
Edge = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Center of each block, and points of each edge, which curves between layers and is upright within them."""

    centers: list[Point]
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
    centers = [(xs[i], tops[layer_of[i]] + heights[layer_of[i]] / 2) for i in range(len(sizes))]
    routes = {}
    for source, target in edges:
        start = (centers[source][0], centers[source][1] + sizes[source][1] / 2)
        end = (centers[target][0], centers[target][1] - sizes[target][1] / 2)
        between = bends[source, target]
        upright = [(xs[i], tops[layer_of[i]] + down) for i in between for down in (0, heights[layer_of[i]])]
        routes[source, target] = [start, *upright, end]
    width = max((x + wide for x, wide in zip(xs, half, strict=True)), default=0.0)
    return Layout(centers, routes, width, tops[-1] - _LAYER_GAP)


def _layers(count: int, edges: Sequence[Edge]) -> list[int]:
    """Return the layer of each block: below those that it reads. A block that reads none is just
    above its first reader.
    """
    layers = _below(edges, [0] * count)
    reading, giving = {target for _, target in edges}, {source for source, _ in edges}
    for block in giving - reading:
        targets = [target for source, target in edges if source == block]
        layers[block] = min(layers[target] for target in [t for t in targets if t in giving] or targets) - 1
    layers = _below(edges, layers)
    number = {layer: i for i, layer in enumerate(sorted(set(layers)))}
    return [number[layer] for layer in layers]


def _below(edges: Sequence[Edge], layers: list[int]) -> list[int]:
    """Move each block below those that it reads. The number of rounds is limited, in case of a cycle."""
    for _ in layers:
        for source, target in edges:
            layers[target] = max(layers[target], min(layers[source] + 1, len(layers)))
    return layers


def _columns(layers: list[list[int]], near: Sequence[Sequence[int]], half: Sequence[float]) -> list[float]:
    """Return horizontal positions: first the best order in layers, then the nearest to neighbors."""
    xs = [0.0] * len(half)
    for layer in layers:
        _move(layer, [(0.0, 1.0)] * len(layer), xs, half)
    candidates = []
    for i in range(_ORDERINGS):
        for before, layer in pairwise(layers[:: -1 if i % 2 else 1]):
            pulls = {item: [xs[other] for other in near[item] if other in before] or [xs[item]] for item in layer}
            means = {item: sum(positions) / len(positions) for item, positions in pulls.items()}
            layer.sort(key=means.__getitem__)
            _move(layer, [(means[item], 1.0) for item in layer], xs, half)
        length = sum(abs(xs[item] - xs[other]) for item, others in enumerate(near) for other in others)
        candidates.append((length, [list(layer) for layer in layers], list(xs)))
    _, layers, xs = min(candidates)
    for i in range(_SWEEPS):
        close = (_FAR * (_NEAR / _FAR) ** (i / _SWEEPS)) ** 2
        for layer in layers[:: 1 if i % 2 else -1]:
            targets = []
            for item in layer:  # edges that are nearly straight have the most weight: they should get straight
                weighted = [(xs[other], 1 / ((xs[other] - xs[item]) ** 2 + close)) for other in near[item]]
                total = sum(weight for _, weight in weighted)
                mean = sum(x * weight for x, weight in weighted) / total if weighted else xs[item]
                targets.append((mean, total or 1e-9))
            _move(layer, targets, xs, half)
    left = min((x - width for x, width in zip(xs, half, strict=True)), default=0.0)
    return [x - left for x in xs]


def _move(layer: Sequence[int], targets: Sequence[Point], xs: list[float], half: Sequence[float]) -> None:
    """Move a layer towards targets (position, weight) by least squares. Order and distances are kept."""
    apart = [half[a] + half[b] + (_EDGE_GAP if _BEND in (half[a], half[b]) else _GAP) for a, b in pairwise(layer)]
    offsets = list(accumulate(apart, initial=0.0))
    pools: list[tuple[float, float, int]] = []  # mean, weight, length: neighbors that have met move as one
    for (x, weight), offset in zip(targets, offsets, strict=True):
        mean, total, length = x - offset, weight, 1
        while pools and pools[-1][0] >= mean:
            other, heavy, long = pools.pop()
            mean, total, length = (mean * total + other * heavy) / (total + heavy), total + heavy, length + long
        pools.append((mean, total, length))
    means = [mean for mean, _, length in pools for _ in range(length)]
    for item, mean, offset in zip(layer, means, offsets, strict=True):
        xs[item] = mean + offset
