"""Reports of `verify` and `check_gradients`."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any, Literal


class Report(ABC):
    """Base class of reports. `print(report)` shows all; `report.ok` is False if something is wrong."""

    made_up: tuple[str, ...]
    """Names of the inputs that were drawn at random."""

    @property
    @abstractmethod
    def ok(self) -> bool: ...

    @property
    @abstractmethod
    def heading(self) -> str: ...

    @abstractmethod
    def table(self) -> list[list[str]]:
        """Return the rows as text, under a row of titles."""

    @property
    @abstractmethod
    def remarks(self) -> list[str]:
        """Lines below the table."""

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.table(), strict=True)]
        cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in self.table())
        return "\n".join([self.heading, *("  ".join(row).rstrip() for row in cells), *self.remarks])

    @property
    def _made_up(self) -> str:
        return f"; random inputs: {', '.join(self.made_up)}" if self.made_up else ""


# ---- engines ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first value, in execution order, that an engine computes differently."""

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
class EngineRow:
    """One engine with one kind of derivative."""

    engine: str
    derivative: str
    """`own` (the framework's autodiff) or `rules` (Onward's)."""
    verdict: str
    """`agrees`, `differs`, or `cannot`."""
    losses: tuple[float, ...] = ()
    metrics: float = 0.0
    """Largest relative difference of a metric from the reference."""
    state: float = 0.0
    """Largest relative difference of the state after the last step."""
    seconds: float = 0.0
    """Time of all steps, without start-up."""
    note: str = ""
    difference: Difference | None = None

    def cells(self) -> list[str]:
        if self.verdict == "cannot":
            return [self.engine, self.derivative, self.verdict, "", "", "", "", ""]
        first, last = (f"{self.losses[i]:.7g}" if self.losses else "" for i in (0, -1))
        numbers = [f"{self.metrics:.1e}", f"{self.state:.1e}", f"{self.seconds:.2f}"]
        return [self.engine, self.derivative, self.verdict, first, last, *numbers]


@dataclasses.dataclass(frozen=True)
class EngineReport(Report):
    """The result of `verify`; `ok` if all engines that can run the model agree."""

    rows: tuple[EngineRow, ...]
    reference: str
    steps: int
    tolerance: float
    made_up: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(row.verdict != "differs" for row in self.rows)

    @property
    def heading(self) -> str:
        return f"{self.steps} steps on each engine, compared with {self.reference}{self._made_up}"

    def table(self) -> list[list[str]]:
        titles = ["engine", "derivative", "verdict", "first loss", "last loss", "metrics", "state", "seconds"]
        return [titles, *(row.cells() for row in self.rows)]

    @property
    def remarks(self) -> list[str]:
        notes = [f"{row.engine} ({row.derivative}): {row.note}" for row in self.rows if row.note]
        return notes + [str(row.difference) for row in self.rows if row.difference is not None]

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **dataclasses.asdict(self)}


# ---- gradients -------------------------------------------------------------------------------------------------------

Verdict = Literal["ok", "kink", "unclear", "wrong", "not finite"]
"""A kink: the slopes to the left and to the right differ, and the gradient is right beside this point.
Unclear: rounding makes the differences too coarse to tell."""


@dataclasses.dataclass(frozen=True)
class GradientRow:
    """One derivative along a random direction, compared; of several directions, the worst."""

    x: str
    order: int
    """1: a derivative of y; 2: a derivative of its gradient."""
    by_gradient: float
    by_differences: float
    difference: float
    """Relative to the norm of the gradient."""
    verdict: Verdict
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict not in ("wrong", "not finite")

    def cells(self) -> list[str]:
        x = self.x if self.order == 1 else f"{self.x} (order {self.order})"
        verdict = f"{self.verdict}: {self.note}" if self.note else self.verdict
        return [x, _number(self.by_gradient), _number(self.by_differences), f"{self.difference:.1e}", verdict]


@dataclasses.dataclass(frozen=True)
class Culprit:
    """A node whose own derivative is wrong: that of `output` by `row.x`."""

    node: str
    operator: str
    output: str
    row: GradientRow

    def __str__(self) -> str:
        return (
            f"{self.operator} (node `{self.node}`): the derivative of `{self.output}` by `{self.row.x}` is "
            f"{_number(self.row.by_gradient)} by its rule, {_number(self.row.by_differences)} by differences"
        )


@dataclasses.dataclass(frozen=True)
class GradientReport(Report):
    """The result of `check_gradients` for all xs."""

    y: str
    rows: tuple[GradientRow, ...]
    tolerance: float
    seed: int
    made_up: tuple[str, ...] = ()
    culprit: Culprit | None = None
    """The first wrong operator, if one was located."""

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def heading(self) -> str:
        return f"derivatives of {self.y} along random directions, in float64{self._made_up}"

    def table(self) -> list[list[str]]:
        titles = ["x", "by gradient", "by differences", "difference", "verdict"]
        return [titles, *(row.cells() for row in self.rows)]

    @property
    def remarks(self) -> list[str]:
        if self.culprit is not None:
            return [f"first wrong operator: {self.culprit}"]
        if any(row.verdict == "wrong" for row in self.rows):
            return ["each operator that can be checked alone is right"]
        return []

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **_plain(dataclasses.asdict(self))}


def _number(value: float) -> str:
    return f"{value:.8g}"


def _plain(value: Any) -> Any:
    """Return a value for JSON, which has no infinity and no NaN."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
