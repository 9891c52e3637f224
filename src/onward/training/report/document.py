"""HTML of a report: one file with its style and scripts, without network requests."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

from onward.inspect import Summary
from onward.inspect.formatting import quantity, setting, shape, shorten, size
from onward.training.report.charts import charts
from onward.training.report.history import ENDS, History, cards, facts


class Markup(str):
    """Text that is HTML already."""


def tag(name: str, /, *content: str, **attributes: str | bool | None) -> Markup:
    """Return an element. Attributes: `class_` is `class`, `aria_label` is `aria-label`; False and None are left out."""
    attribute_text = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{attribute_text}>{join(*content)}</{name}>")


def join(*content: str) -> Markup:
    return Markup("".join(item if isinstance(item, Markup) else escape(item) for item in content))


def escape(text: str) -> str:
    """Escape text for HTML, also characters that do not print or that reorder others."""
    printable = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return html.escape(printable)


def data(value: Any) -> Markup:
    """Return a value as JSON that cannot end the script it stands in, nor begin a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


_SCRIPTS = ("axes.js", "curves.js", "layers.js", "main.js")
_MOST_ROWS, _MOST_LAYERS_AT_ONCE, _MOST_EVENTS = 400, 12, 60


def document(history: History, config: dict[str, Any], summary: Summary | None, remarks: list[str]) -> str:
    drawn = charts(history)
    model = history.start.get("model") or (summary.name if summary else "a run")
    name = shorten(re.split(r"[/\\]", str(model))[-1], 80)
    body = join(
        _header(name, history),
        tag("main", *_warnings(history, remarks), *_sections(history, config, summary, drawn)),
        tag("footer", "Written by ", tag("code", "onward report"), ". Times are in UTC."),
    )
    script = Markup('"use strict";\n(() => {\n' + "".join(_resource(file) for file in _SCRIPTS) + "})();\n")
    head = join(
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">'),
        tag("title", f"{name}: training report"),
        tag("style", Markup(_resource("style.css"))),
    )
    content = tag("script", data(drawn), type="application/json", id="run")
    page = tag("html", tag("head", head), "\n", tag("body", body, content, tag("script", script)), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _resource(name: str) -> str:
    return files("onward.training.report").joinpath("page", name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Return a policy that forbids requests and other scripts, in case something was not escaped."""
    fingerprint = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{fingerprint}'"


# ---- the top ---------------------------------------------------------------------------------------------------------


def _header(name: str, history: History) -> Markup:
    word, style, _ = ENDS.get(history.reason or "", (history.reason or "unfinished", "open", ""))
    times = [event.time for event in history.events if event.time is not None]
    began = tag("p", f"Started {_time(times[0])}", class_="when") if times else ""
    return tag(
        "header",
        tag("p", "Training report", class_="kicker"),
        tag("h1", name, " ", tag("span", shorten(word), class_=f"status {style}")),
        began,
    )


def _warnings(history: History, remarks: list[str]) -> Iterator[Markup]:
    if history.reason == "not_finite":
        failure = f"{history.failure[:1].upper()}{history.failure[1:]}."
        saves = [event for event in history.events if event.name == "save"]
        saved = f" The last save was after step {saves[-1].step:,}." if saves else ""
        advice = " A lower learning rate, warm-up or clipped gradients often help."
        yield tag("div", tag("strong", "The run stopped. "), failure + saved + advice, class_="alert bad", role="alert")
    if history.reason is None and history.step:
        text = "It is still training, or was killed. This page shows its log so far."
        yield tag("div", tag("strong", "The run has not ended. "), text, class_="alert")
    if not history.step:
        yield tag("div", tag("strong", "No step was logged. "), "There is nothing to draw yet.", class_="alert")
    for remark in remarks:
        yield tag("div", remark, class_="alert")


# ---- sections --------------------------------------------------------------------------------------------------------


def _sections(
    history: History, config: dict[str, Any], summary: Summary | None, drawn: dict[str, Any]
) -> Iterator[Markup]:
    yield _cards(history, summary)
    if listed := list(facts(history, config, summary)):
        yield _section("What was trained", tag("dl", *(_fact(*fact) for fact in listed), class_="facts panel"))
    if drawn["curves"]:
        yield _section("Curves", _controls(), _curves(drawn["curves"]))
    if drawn["norms"] or drawn["map"]:
        yield _section("Gradient norms by layer", *_norms(drawn))
    if drawn["histograms"]:
        yield _section("Weights by layer, over time", *_histograms(drawn["histograms"]))
    if any(history.validation.values()):
        yield _fold("Epochs and validation, in numbers", _validation(history))
    if history.events:
        yield _section("Events", _events(history))
    if summary is not None and summary.weights:
        yield _fold(f"Parameters: {quantity(len(summary.weights), 'tensor')}", _parameters(summary))
    if config:
        yield _fold("Configuration", tag("dl", *(_fact(str(k), setting(v)) for k, v in config.items()), class_="facts"))


def _section(title: str, *content: Markup) -> Markup:
    return tag("section", tag("h2", title), *content)


def _fold(title: str, content: Markup) -> Markup:
    return tag("section", tag("details", tag("summary", tag("h2", title)), content, class_="panel"))


def _fact(label: str, text: str) -> Markup:
    return tag("div", tag("dt", label), tag("dd", text))


def _cards(history: History, summary: Summary | None) -> Markup:
    shown = [
        tag("div", tag("dt", shorten(label, 40)), tag("dd", value), tag("dd", note, class_="note"), class_="card")
        for label, value, note in cards(history, summary)
    ]
    columns = len(shown) if len(shown) <= 7 else math.ceil(len(shown) / 2)
    return tag("dl", *shown, class_="cards", style=f"--columns: {columns}")


def _controls() -> Markup:
    slider = Markup('<input type="range" id="smoothing" min="0" max="100" value="40">')
    label = tag("label", "Smoothing ", slider, for_="smoothing")
    help_ = tag("span", "Point at a chart, or focus it and use the arrow keys, to read values.", class_="hint")
    return tag("div", label, help_, class_="controls")


def _curves(curves: list[dict[str, Any]]) -> Markup:
    without_script = tag("noscript", tag("p", "The charts of this page need JavaScript."))
    figures = (_figure(chart["title"], "curve", str(i)) for i, chart in enumerate(curves))
    return join(without_script, tag("div", *figures, class_="grid"))


def _figure(title: str, kind: str, index: str = "") -> Markup:
    caption = tag("figcaption", tag("h3", shorten(title)), tag("span", class_="legend"))
    return tag("figure", caption, tag("div", class_="plot"), class_=f"panel {kind}", data_index=index)


def _norms(drawn: dict[str, Any]) -> Iterator[Markup]:
    yield _figure("gradient norms", "norms" if drawn["norms"] else "map")
    if drawn["map"] and drawn["map"]["left_out"]:
        yield tag("p", f"{quantity(drawn['map']['left_out'], 'more layer')} not drawn.", class_="hint")


def _histograms(layers: list[dict[str, Any]]) -> Iterator[Markup]:
    figures = [_figure(layer["name"], "ridges", str(i)) for i, layer in enumerate(layers)]
    first, rest = figures[:_MOST_LAYERS_AT_ONCE], figures[_MOST_LAYERS_AT_ONCE:]
    yield tag("p", "The oldest at the back, the newest in front, each drawn as high as the others.", class_="hint")
    yield tag("div", *first, class_="grid small")
    if rest:
        title = tag("summary", quantity(len(rest), "more layer"))
        yield tag("details", title, tag("div", *rest, class_="grid small"), class_="more")


# ---- tables ----------------------------------------------------------------------------------------------------------


def _table(header: list[str], rows: list[list[str | Markup]], numbers: set[int], left_out: int = 0) -> Markup:
    """Return a table. Columns with an index in `numbers` are aligned on the right."""

    def cells(element: str, row: list[str] | list[str | Markup]) -> Iterator[Markup]:
        for i, cell in enumerate(row):
            yield tag(
                element, cell, class_="number" if i in numbers else None, scope="col" if element == "th" else None
            )

    body = [tag("tr", *cells("td", row)) for row in rows]
    table = tag("table", tag("thead", tag("tr", *cells("th", header))), tag("tbody", *body))
    note = tag("p", f"{left_out:,} more rows are left out.", class_="hint") if left_out else ""
    return join(tag("div", table, class_="scroll", tabindex="0"), note)


def _validation(history: History) -> Markup:
    series = {"training loss": history.epochs} if history.epochs else {}
    series |= {name: values for name, values in history.validation.items() if values}
    steps = sorted({int(step) for values in series.values() for step in values.steps})
    shown = steps[-_MOST_ROWS:]
    rows: list[list[str | Markup]] = []
    for step in shown:
        row = [values.at(step) for values in series.values()]
        rows.append([f"{step:,}", *("" if value is None else f"{value:.6g}" for value in row)])
    header = ["step", *(shorten(name, 40) for name in series)]
    return _table(header, rows, set(range(len(header))), len(steps) - len(shown))


def _events(history: History) -> Markup:
    others = [i for i, event in enumerate(history.events) if event.name != "save"][-_MOST_EVENTS:]
    saves = [i for i, event in enumerate(history.events) if event.name == "save"]
    shown = sorted([*others, *saves[-max(_MOST_EVENTS - len(others), 10) :]])  # saves repeat, others tell more
    events = [history.events[i] for i in shown]
    rows: list[list[str | Markup]] = [
        [
            tag("span", "", class_=f"dot {event.name if event.name in _DOTS else ''}", aria_hidden="true"),
            f"{event.step:,}",
            "" if (epochs := history.epochs_at(event.step)) is None else f"{epochs:.4g}",
            event.text,
            _time(event.time) if event.time is not None else "",
        ]
        for event in events
    ]
    header = ["", "step", "epoch", "what happened", "when"]
    left_out = len(history.events) - len(events)
    return tag("div", _table(header, rows, {1, 2}, left_out), class_="panel")


_DOTS = {"start", "save", "resume", *ENDS}


def _parameters(summary: Summary) -> Markup:
    largest = max(weight.numbers for weight in summary.weights) or 1
    shown = summary.weights[:_MOST_ROWS]
    rows: list[list[str | Markup]] = [
        [
            tag("code", shorten(weight.name, 70)),
            weight.type,
            shape(weight.shape),
            f"{weight.numbers:,}",
            Markup(f'<meter min="0" max="{largest}" value="{weight.numbers}" aria-hidden="true"></meter>'),
            size(weight.bytes),
            weight.role,
        ]
        for weight in shown
    ]
    header = ["name", "type", "shape", "numbers", "", "bytes", "role"]
    return _table(header, rows, {3, 5}, len(summary.weights) - len(shown))


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "unknown"
