"""The look of a picture: an SVG file that needs nothing else, on light and on dark paper."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from xml.etree import ElementTree

from rich.cells import cell_len

from onward.inspect.picture.blocks import Block, Kind, Picture
from onward.inspect.picture.layout import Layout, Point
from onward.inspect.wording import clean, shortened

_MARGIN, _PADDING, _MARK = 24.0, 11.0, 10.0
_TITLE_HEIGHT, _ROW_HEIGHT, _TITLE_LETTER, _ROW_LETTER = 17.0, 14.0, 7.8, 6.1
_MOST_TITLE, _MOST_ROW = 36, 44
_HEADER = 34.0

_MEANING: dict[Kind, str] = {
    "input": "input",
    "inference": "inference",
    "training": "the same in training mode",
    "loss": "loss",
    "gradient": "gradient",
    "update": "what is done with gradients",
    "schedule": "schedule",
    "optimizer": "optimizer",
    "state": "state",
    "output": "output",
    "metric": "metric",
}
_MARKS = {"trained": "trained", "trainable": "trainable", "frozen": "frozen", "statistics": "statistics"}

# Kind -> fill and line on light paper, fill and line on dark paper.
_COLOURS: dict[Kind, tuple[str, str, str, str]] = {
    "input": ("#f3f4f6", "#7c8591", "#22272e", "#8b949e"),
    "output": ("#f3f4f6", "#7c8591", "#22272e", "#8b949e"),
    "metric": ("#ffffff", "#7c8591", "#161b22", "#8b949e"),
    "inference": ("#e5f0fc", "#3f7fc4", "#12263d", "#5b9be0"),
    "training": ("#dff5f1", "#238b7b", "#0d2b27", "#3fb9a6"),
    "loss": ("#fde8e8", "#cc4b4f", "#3a1618", "#ea7377"),
    "gradient": ("#efe7fb", "#7f57c2", "#261a3d", "#a988e6"),
    "update": ("#fdf3e3", "#c98a2b", "#33240c", "#dba24b"),
    "schedule": ("#f8f6dc", "#9a8a1c", "#2b280c", "#c3b44a"),
    "optimizer": ("#fce0bd", "#bf6f0e", "#40280a", "#ef9f3c"),
    "state": ("#e3f4e3", "#3f9142", "#12301a", "#5cb862"),
}
_MARK_COLOURS = {
    "trained": ("#2f8f3a", "#5cc869"),
    "trainable": ("#2f8f3a", "#5cc869"),
    "frozen": ("#5b7fa8", "#8fb3dd"),
    "statistics": ("#a08a2a", "#d0bb55"),
}


def write(picture: Picture, layout: Layout, name: str) -> str:
    return _Svg(picture, layout, clean(name)).text()


def size(block: Block) -> Point:
    """Width and height. Fonts differ, so this is a guess, and a generous one."""
    margin = _MARK if any(mark for mark, _ in block.rows) else 0.0
    widths = [cell_len(shortened(block.title, _MOST_TITLE)) * _TITLE_LETTER]
    widths += [cell_len(shortened(text, _MOST_ROW)) * _ROW_LETTER + margin for _, text in block.rows]
    return max(widths) + 2 * _PADDING, _TITLE_HEIGHT + _ROW_HEIGHT * len(block.rows) + 10


class _Svg:
    """Writes a picture. Texts go through the XML library, which escapes them."""

    def __init__(self, picture: Picture, layout: Layout, name: str):
        self._picture, self._layout = picture, layout
        legend, legend_width, legend_height = self._legend(max(layout.width, 460.0))
        width = max(layout.width, legend_width, len(name) * _TITLE_LETTER * 1.2) + 2 * _MARGIN
        height = layout.height + legend_height + _HEADER + 2 * _MARGIN
        size = {
            "viewBox": f"0 0 {width:.0f} {height:.0f}",
            "width": f"{width:.0f}",
            "style": "max-width:100%;height:auto",
        }
        self._root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", **size})
        _child(self._root, "title").text = name
        _child(self._root, "style").text = _style()
        _child(self._root, "rect", {"class": "paper", "width": "100%", "height": "100%"})
        self._arrow()
        _text(self._root, name, _MARGIN, _MARGIN + 12, "name")
        legend.set("transform", f"translate({_MARGIN:.1f} {_MARGIN + _HEADER - 8:.1f})")
        self._root.append(legend)
        left, top = (width - layout.width) / 2, _MARGIN + _HEADER + legend_height
        graph = _child(self._root, "g", {"transform": f"translate({left:.1f} {top:.1f})"})
        for edge, names in picture.edges.items():
            self._edge(graph, layout.routes[edge], names)
        for block, centre in zip(picture.blocks, layout.centres, strict=True):
            self._block(graph, block, centre)

    def text(self) -> str:
        ElementTree.indent(self._root)
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def _arrow(self) -> None:
        attributes = {"id": "arrow", "viewBox": "0 0 8 8", "refX": "7", "refY": "4", "markerWidth": "7"}
        marker = _child(self._root, "marker", {**attributes, "markerHeight": "7", "orient": "auto"})
        _child(marker, "path", {"d": "M0 0.5 L8 4 L0 7.5 z", "class": "head"})

    def _legend(self, width: float) -> tuple[ElementTree.Element, float, float]:
        legend = ElementTree.Element("g")
        marks = {mark for block in self._picture.blocks for mark, _ in block.rows if mark}
        items = [(f"block {kind}", text) for kind, text in _MEANING.items() if kind in self._picture.kinds()]
        items += [(f"mark {mark}", text) for mark, text in _MARKS.items() if mark in marks]
        x, y, widest = 0.0, 0.0, 0.0
        for style, text in items:
            needed = 20 + len(text) * _ROW_LETTER + 14
            if x and x + needed > width:
                x, y = 0.0, y + 18
            shape = {"x": "0", "y": "-9", "width": "13", "height": "11", "rx": "3"}
            place = _child(legend, "g", {"transform": f"translate({x:.1f} {y + 12:.1f})"})
            if style.startswith("mark"):
                _child(place, "circle", {"class": style, "cx": "6.5", "cy": "-3.5", "r": "3.5"})
            else:
                _child(place, "rect", {"class": style, **shape})
            _text(place, text, 18, 0, "row")
            x += needed
            widest = max(widest, x)
        return legend, widest, y + 30

    def _edge(self, parent: ElementTree.Element, route: Sequence[Point], names: Sequence[str]) -> None:
        path = _child(parent, "path", {"class": "edge", "d": _curve(route), "marker-end": "url(#arrow)"})
        _child(path, "title").text = "\n".join(clean(name) for name in names)

    def _block(self, parent: ElementTree.Element, block: Block, centre: Point) -> None:
        width, height = size(block)
        x, y = centre[0] - width / 2, centre[1] - height / 2
        group = _child(parent, "g", {"transform": f"translate({x:.1f} {y:.1f})"})
        _child(group, "title").text = "\n".join([clean(block.title), *block.notes])
        round_ends = block.kind in ("input", "output", "metric")
        corner = f"{height / 2:.1f}" if round_ends else "5"
        box = {"class": f"block {block.kind}", "width": f"{width:.1f}", "height": f"{height:.1f}", "rx": corner}
        _child(group, "rect", box)
        _text(group, shortened(block.title, _MOST_TITLE), width / 2, 17, "title")
        marked = any(mark for mark, _ in block.rows)
        for i, (mark, text) in enumerate(block.rows):
            base, shown = 17 + _ROW_HEIGHT * (i + 1), shortened(text, _MOST_ROW)
            if marked:
                _text(group, shown, _PADDING + _MARK, base, "row")
            else:
                _text(group, shown, width / 2, base, "row middle")
            if mark:
                place = {"cx": f"{_PADDING + 3:.1f}", "cy": f"{base - 3.5:.1f}", "r": "3"}
                _child(group, "circle", {"class": f"mark {mark}", **place})


def _curve(route: Sequence[Point]) -> str:
    """Curves between layers, straight lines through them."""
    steps = [f"M{route[0][0]:.1f} {route[0][1]:.1f}"]
    for i, ((x0, y0), (x1, y1)) in enumerate(pairwise(route)):
        half = (y1 - y0) / 2
        curve = f"C{x0:.1f} {y0 + half:.1f} {x1:.1f} {y1 - half:.1f} {x1:.1f} {y1:.1f}"
        steps.append(curve if i % 2 == 0 else f"L{x1:.1f} {y1:.1f}")
    return "".join(steps)


def _style() -> str:
    rules = [
        "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}",
        ".name{font-size:15px;font-weight:600}.title{font-size:12px;font-weight:600;text-anchor:middle}",
        ".row{font-size:10.5px}.middle{text-anchor:middle}.block{stroke-width:1.2}.state{stroke-dasharray:4 2.5}",
        ".edge{fill:none;stroke-width:1.2}g:hover>rect.block{stroke-width:2.4}.edge:hover{stroke-width:3}",
        *_paper("#ffffff", "#1f2328", "#9aa4af"),
        *(f".{kind}{{fill:{fill};stroke:{line}}}" for kind, (fill, line, _, _) in _COLOURS.items()),
        *(f".mark.{mark}{{fill:{light}}}" for mark, (light, _) in _MARK_COLOURS.items()),
        "@media (prefers-color-scheme:dark){",
        *_paper("#0d1117", "#e6edf3", "#6e7681"),
        *(f".{kind}{{fill:{fill};stroke:{line}}}" for kind, (_, _, fill, line) in _COLOURS.items()),
        *(f".mark.{mark}{{fill:{dark}}}" for mark, (_, dark) in _MARK_COLOURS.items()),
        "}",
    ]
    return "".join(rules)


def _paper(paper: str, ink: str, line: str) -> list[str]:
    return [f".paper{{fill:{paper}}}", f"text{{fill:{ink}}}", f".edge{{stroke:{line}}}", f".head{{fill:{line}}}"]


def _child(parent: ElementTree.Element, tag: str, attributes: dict[str, str] | None = None) -> ElementTree.Element:
    return ElementTree.SubElement(parent, tag, attributes or {})


def _text(parent: ElementTree.Element, text: str, x: float, y: float, style: str) -> None:
    _child(parent, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "class": style}).text = text
