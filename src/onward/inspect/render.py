"""A summary on a screen: one that is calm, and at most one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from onward.inspect.formatting import amount, clean, list_names, shape, shorten, size
from onward.inspect.rows import Row, model_rows, step_rows
from onward.inspect.summary import Amount, Summary, Weight

_INDENT, _LABEL_WIDTH = 2, 12
_LABEL, _FAINT = "cyan", "bright_black"

_GAP = "  "
_NARROWEST = {"name": 14, "shape": 9, "reason": 14}
"""Columns whose cells may take several lines, and how narrow they get for that."""


def render(summary: Summary, console: Console) -> None:
    """Print what is in a model."""
    kind = "training model" if summary.is_training_model else "inference model"
    _print(console, Text.assemble((_encode(shorten(summary.name), console), "bold"), "  ", (kind, _FAINT)))
    _print_rows(console, model_rows(summary))
    for index, step in enumerate(summary.steps):
        title = "training" if len(summary.steps) == 1 else f"step {index}: {shorten(step.name)}"
        _print(console, Text("\n" + _encode(title, console), "bold"))
        _print_rows(console, step_rows(summary, step))
    if summary.parameters["trainable"].tensors:
        name = shorten(summary.name) if summary.file.path else "model.onnx"
        hint = f"make it a training model: onward prepare {name} --loss ..."
        _print(console, Text("\n" + _encode(hint, console), _FAINT))


def render_parameters(summary: Summary, console: Console) -> None:
    """Print a table of all constant tensors of the model, and what each is to training."""
    whose = {weight.name: _group_of(weight, summary) for weight in summary.weights}
    columns: dict[str, list[str]] = {
        "name": [clean(weight.name) for weight in summary.weights],
        "shape": [shape(weight.shape).replace(" ", "") for weight in summary.weights],
        "type": [weight.type for weight in summary.weights],
        "size": [size(weight.bytes) for weight in summary.weights],
        "role": [str(weight.role) for weight in summary.weights],
        "group": [clean(group) for group in whose.values()],
        "reason": [clean(weight.reason) for weight in summary.weights],
    }
    if len(set(whose.values()) - {""}) < 2:
        del columns["group"]
    if summary.weights:
        _print_table(console, columns)
    counts = [f"{of.numbers:,} {role}" for role, of in summary.parameters.items() if of.tensors]
    total = f"total  {amount(Amount.of(summary.weights))}"
    text = Text(": ".join([total, ", ".join(counts)] if counts else [total]), "bold")
    console.print(text, soft_wrap=not console.is_terminal)


def _group_of(weight: Weight, summary: Summary) -> str:
    """The group; with several steps, which of them."""
    if len(summary.steps) < 2 or not weight.steps:
        return weight.group or ""
    return f"step {list_names([str(index) for index in weight.steps], 3)}"


# ---- printing --------------------------------------------------------------------------------------------------------
# Everything is printed as `Text`, which has no markup: a parameter may be called `[red]`.


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)


def _print_rows(console: Console, rows: Iterable[Row]) -> None:
    width = max(console.width - _INDENT - _LABEL_WIDTH, 20)
    for label, content in rows:
        text = content if isinstance(content, str) else _flowing(content, width)
        for i, line in enumerate(Text(_encode(text, console)).wrap(console, width, overflow="fold")):
            line.rstrip()
            head = (label if i == 0 else "").ljust(_LABEL_WIDTH)
            _print(console, Text.assemble(" " * _INDENT, (head, _LABEL), line))


def _flowing(items: Iterable[str], width: int) -> str:
    """Items with commas between them, in lines that end behind a comma."""
    lines = [""]
    for item in items:
        if lines[-1] and cell_len(lines[-1]) + cell_len(item) + 2 > width:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{item},"
    return "\n".join(lines).removesuffix(",")


def _print_table(console: Console, columns: dict[str, list[str]]) -> None:
    widths = {heading: max(map(cell_len, (heading, *cells))) for heading, cells in columns.items()}
    while console.is_terminal and sum(widths.values()) + len(_GAP) * (len(widths) - 1) > console.width:
        heading = max(_NARROWEST, key=lambda heading: widths[heading] - _NARROWEST[heading])
        if widths[heading] <= _NARROWEST[heading]:
            break  # a line that is too long loses less than a column that is too narrow
        widths[heading] -= 1
    _print_table_row(console, {heading: heading for heading in columns}, widths, "bold")
    for row in zip(*columns.values(), strict=True):
        _print_table_row(console, dict(zip(columns, row, strict=True)), widths)


def _print_table_row(console: Console, row: dict[str, str], widths: dict[str, int], style: str = "") -> None:
    cells = [
        Text(_encode(cell, console), justify="right" if heading == "size" else "left").wrap(
            console, widths[heading], overflow="fold"
        )
        for heading, cell in row.items()
    ]
    for parts in zip_longest(*cells):
        texts = [part or Text() for part in parts]
        for text, (heading, width) in zip(texts, widths.items(), strict=True):
            text.align("right" if heading == "size" else "left", width)
        line = Text(_GAP, style).join(texts)
        line.rstrip()
        _print(console, line)


def _encode(text: str, console: Console) -> str:
    """The text with what the terminal's encoding lacks written as an escape."""
    return text.encode(console.encoding, "backslashreplace").decode(console.encoding)
