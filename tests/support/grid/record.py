"""What came of the cells of the grid when they were tried last, and the rows of tables that show it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

RECORD = Path(__file__).parent / "outcomes.json"
FRAMEWORKS = {"torch": "PyTorch", "keras": "Keras", "jax": "JAX", "tensorflow": "TensorFlow"}


class Outcome(NamedTuple):
    """What a conversion makes of something."""

    way: str
    """`native`: the other side has it. `exact`: it gets a small class or function with the same formula. `traced`: what
    the framework computes is written down, operation by operation. `refused`."""
    what: str = ""
    """What it is there; or why it was refused."""


class Cell(NamedTuple):
    """One question: what does a framework make of this?"""

    kind: str
    direction: str
    framework: str
    row: str

    def __str__(self) -> str:
        return " | ".join(self)


def recorded() -> dict[Cell, Outcome]:
    outcomes = json.loads(RECORD.read_text(encoding="utf-8"))
    return {Cell(*key.split(" | ", 3)): Outcome(*value) for key, value in outcomes.items()}


def record(outcomes: dict[Cell, Outcome]) -> None:
    lines = (f"{json.dumps(str(cell))}: {json.dumps(outcome)}" for cell, outcome in outcomes.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


# ---- tables ----------------------------------------------------------------------------------------------------------

Line = tuple[str, ...]


def read(kind: str, framework: str) -> list[Line]:
    """Expressions of a framework, and what a training model has for them."""
    shown: dict[str, list[str]] = {}
    for cell, outcome in recorded().items():
        if cell[:3] == (kind, "from", framework):
            becomes = f"{outcome.way}: {_short(outcome.what)}" if outcome.what else outcome.way
            shown.setdefault(becomes, []).append(cell.row)
    return [(_listed(rows), becomes) for becomes, rows in shown.items()]


def made(kind: str) -> tuple[list[Line], list[str]]:
    """What a recipe says, and what each framework has for it; and why not, by the numbers in the lines.

    What becomes the same shares a line: variants of an optimizer, and then options.
    """
    reasons: list[str] = []
    outcomes = {cell: outcome for cell, outcome in recorded().items() if cell[:2] == (kind, "to")}
    variants: dict[tuple[str, Line], list[str]] = {}
    for row in dict.fromkeys(cell.row for cell in outcomes):
        ways = tuple(_way(outcomes[Cell(kind, "to", name, row)], reasons) for name in FRAMEWORKS)
        plain, _, variant = row.partition("variant=")
        variants.setdefault((plain.rstrip(":,"), ways), []).append(variant)
    together: dict[tuple[str, Line, Line], list[str]] = {}
    for (row, ways), alike in variants.items():
        together.setdefault((row.partition(":")[0], tuple(alike), ways), []).append(row)
    with_variants = kind == "optimizers"
    lines = [
        (_listed(rows), *([", ".join(alike)] if with_variants else []), *ways)
        for (_, alike, ways), rows in together.items()
    ]
    return lines, reasons


def _listed(rows: list[str]) -> str:
    return ", ".join(f"`{row}`" for row in rows)


def _way(outcome: Outcome, reasons: list[str]) -> str:
    if outcome.way != "refused":
        return outcome.way
    reason = _short(outcome.what)
    if reason not in reasons:
        reasons.append(reason)
    return f"refused ({reasons.index(reason) + 1})"


def _short(reason: str) -> str:
    """A message without what every message begins with, and without what Markdown would take for a tag."""
    text = re.sub(r"^the .*? cannot be carried( over| exactly)?: (- )?", "", reason)
    plain_and_code = text.split("`")
    plain_and_code[::2] = (part.replace("<", "&lt;") for part in plain_and_code[::2])
    return "`".join(plain_and_code)
