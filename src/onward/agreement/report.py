"""What `verify` found."""

from __future__ import annotations

import dataclasses
from typing import Any

from onward.agreement.gradcheck.report import align_columns


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first value, in the order of the computation, that an engine computes differently."""

    value: str
    step: int
    """The first is 1."""
    engine: str
    reference: str
    magnitude: float
    """The largest element by the engine; NaN if one is."""
    expected: float
    """The largest element by the reference."""
    relative: float
    """The largest difference of two elements, relative to the largest element."""

    def __str__(self) -> str:
        return (
            f"`{self.value}` is the first value that differs, in step {self.step}: at most {self.magnitude:.6g} on "
            f"{self.engine}, {self.expected:.6g} on {self.reference} (relative difference {self.relative:.1e})"
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """One engine, with one way to the derivative."""

    engine: str
    derivative: str
    """`own`, the framework's, or `rules`, ours."""
    verdict: str
    """`agrees`, `differs`, or `cannot`."""
    losses: tuple[float, ...] = ()
    metrics: float = 0.0
    """The largest relative difference of a metric from that of the reference."""
    state: float = 0.0
    """The same of the state after the last step."""
    seconds: float = 0.0
    """For all steps, without what comes before them."""
    note: str = ""
    difference: Difference | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """`print(report)` shows it; `report.ok` says whether all engines that can run the model agree."""

    rows: tuple[Row, ...]
    reference: str
    steps: int
    tolerance: float
    made_up: tuple[str, ...] = ()
    """Inputs that were not given."""

    @property
    def ok(self) -> bool:
        return all(row.verdict != "differs" for row in self.rows)

    @property
    def heading(self) -> str:
        made_up = f"; made up: {', '.join(self.made_up)}" if self.made_up else ""
        return f"{self.steps} steps on each engine, compared with {self.reference}{made_up}"

    def table(self) -> list[list[str]]:
        """The rows as text, under a row of titles."""
        titles = ["engine", "derivative", "verdict", "first loss", "last loss", "metrics", "state", "seconds"]
        return [titles, *(_cells(row) for row in self.rows)]

    @property
    def remarks(self) -> list[str]:
        """What to say below the table."""
        notes = [f"{row.engine} ({row.derivative}): {row.note}" for row in self.rows if row.note]
        return notes + [str(row.difference) for row in self.rows if row.difference is not None]

    def __str__(self) -> str:
        return "\n".join([self.heading, *align_columns(self.table()), *self.remarks])

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **dataclasses.asdict(self)}


def _cells(row: Row) -> list[str]:
    if row.verdict == "cannot":
        return [row.engine, row.derivative, row.verdict, "", "", "", "", ""]
    first, last = (f"{row.losses[i]:.7g}" if row.losses else "" for i in (0, -1))
    return [
        row.engine,
        row.derivative,
        row.verdict,
        first,
        last,
        f"{row.metrics:.1e}",
        f"{row.state:.1e}",
        f"{row.seconds:.2f}",
    ]
