"""What `onward prepare` says in the end: what became of the model in a few lines, and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.cli.console import print_rows
from onward.cli.files import Target

if TYPE_CHECKING:
    from onward.inspect import Summary

_LEFT_OUT = {"in", "metrics", "trained", "progress", "state"}
"""What `onward show` tells about a step, and what is said otherwise here or goes without saying."""


def print_prepared(summary: Summary, place: Target) -> None:
    from onward.inspect.formatting import amount, quantity, shape
    from onward.inspect.rows import step_rows

    step, frozen = summary.steps[-1], summary.parameters["frozen"].tensors
    fed = [f"{port.name} {port.type} {shape(port.shape)}" for port in (*summary.inputs, *step.inputs)]
    recipe = [(label, text) for label, text in step_rows(summary, step) if label not in _LEFT_OUT]
    rows = [
        ("trains", amount(step.trained) + (f"; {quantity(frozen, 'tensor')} frozen" if frozen else "")),
        *((label, text if isinstance(text, str) else ", ".join(text)) for label, text in recipe),
        ("feed", ", ".join(fed)),
        *(("note", text) for text in summary.remarks),
        ("wrote", place.described()),
        ("next", f"onward show {place.path}"),
        ("", f"onward check {place.path}"),
    ]
    print_rows([[label, line] for label, text in rows for line in text.splitlines()], styles=("bold",))
