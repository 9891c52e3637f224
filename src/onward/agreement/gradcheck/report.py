"""What a check of gradients found."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

Verdict = Literal["ok", "kink", "unclear", "wrong", "not finite"]
"""A kink: here the derivative from one side is not that from the other, and beside it all is well.
Unclear: the differences are too rough, mostly for rounding, to tell."""

_FAILURES = ("wrong", "not finite")


@dataclasses.dataclass(frozen=True)
class Row:
    """How one derivative along a random direction compares; of several directions, the one that compares worst."""

    x: str
    order: int
    """1: a derivative of y; 2: a derivative of its gradient."""
    by_gradient: float
    by_differences: float
    difference: float
    """Relative to the size of the gradient."""
    verdict: Verdict
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict not in _FAILURES


@dataclasses.dataclass(frozen=True)
class Culprit:
    """A node whose own derivative is wrong: that of `output` by `row.x`."""

    node: str
    operator: str
    output: str
    row: Row

    def __str__(self) -> str:
        return (
            f"{self.operator} (node `{self.node}`): the derivative of `{self.output}` by `{self.row.x}` is "
            f"{_number(self.row.by_gradient)} by its rule, {_number(self.row.by_differences)} by differences"
        )


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome for all xs. `print(report)` shows it; `report.ok` says whether nothing is wrong."""

    y: str
    rows: tuple[Row, ...]
    tolerance: float
    seed: int
    made_up: tuple[str, ...] = ()
    """Inputs that were not given."""
    culprit: Culprit | None = None
    """The operator to blame, if one was found."""

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def __str__(self) -> str:
        return "\n".join([self.heading, *align_columns(self.table()), *self.remarks])

    @property
    def heading(self) -> str:
        made_up = f"; made up: {', '.join(self.made_up)}" if self.made_up else ""
        return f"derivatives of {self.y} along random directions, in float64{made_up}"

    def table(self) -> list[list[str]]:
        """The rows as text, under a row of titles."""
        titles = ["x", "by gradient", "by differences", "difference", "verdict"]
        return [
            titles,
            *(
                [
                    row.x if row.order == 1 else f"{row.x} (order {row.order})",
                    _number(row.by_gradient),
                    _number(row.by_differences),
                    f"{row.difference:.1e}",
                    f"{row.verdict}: {row.note}" if row.note else row.verdict,
                ]
                for row in self.rows
            ),
        ]

    @property
    def remarks(self) -> list[str]:
        """What to say below the table."""
        if self.culprit is not None:
            return [f"to blame: {self.culprit}"]
        if any(row.verdict == "wrong" for row in self.rows):
            return ["each operator on the way is right by itself, as far as it can be checked alone"]
        return []

    def to_json(self) -> dict[str, Any]:
        return {
            "y": self.y,
            "ok": self.ok,
            "tolerance": self.tolerance,
            "seed": self.seed,
            "made_up": list(self.made_up),
            "rows": [_plain(row) for row in self.rows],
            "culprit": None if self.culprit is None else _plain(self.culprit),
        }


def _number(value: float) -> str:
    return f"{value:.8g}"


def align_columns(rows: list[list[str]]) -> list[str]:
    """Rows of cells as lines, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _plain(item: Row | Culprit) -> dict[str, Any]:
    """For JSON, which has no number that is not one."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return {key: plain(value) for key, value in dataclasses.asdict(item).items()}
