"""Tries what becomes of optimizers, losses and schedules in each framework: `python tests/support/conversion_grid.py`.

What comes of it is written to tests/support/grid/outcomes.json, of which docs/tables.py makes the tables of
docs/frameworks/grid.md. With words, such as `torch to adam`, only cells that contain them all are tried anew.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import cast

import numpy as np

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import node_tests
from grid import recipes
from grid.record import FRAMEWORKS, Cell, Outcome, record, recorded
from grid.side import KINDS, Framework

from onward.errors import UnsupportedError

DIRECTIONS = ("from", "to")


def cells() -> list[Cell]:
    """All of the grid."""
    return [
        Cell(kind, direction, framework, row)
        for kind in KINDS
        for direction in DIRECTIONS
        for framework in FRAMEWORKS
        for row in rows(kind, direction, framework)
    ]


def rows(kind: str, direction: str, framework: str) -> list[str]:
    return recipes.rows(kind) if direction == "to" else list(side(framework).rows(kind))


def side(framework: str) -> Framework:
    return cast(Framework, importlib.import_module(f"grid.of_{framework}"))


def tried(cell: Cell) -> Outcome:
    """What comes of it; steps that do not agree are an error."""
    framework = side(cell.framework)
    try:
        if cell.direction == "from":
            return framework.read(cell.kind, cell.row)
        started = recipes.started(cell.kind, cell.row)
        outcome, losses = framework.make(cell.kind, started.training.copy(), started.batches)
    except UnsupportedError as refusal:
        return Outcome("refused", " ".join(refusal.message.split()))
    np.testing.assert_allclose(losses, started.losses, rtol=1e-5)
    return outcome


def main(words: list[str]) -> int:
    """Try cells; the number of those whose two sides do not agree."""
    everything, wrong = cells(), 0
    for cell in (cell for cell in everything if all(word in str(cell) for word in words)):
        try:
            outcome = tried(cell)
            print(f"{cell}: {' '.join(outcome)}", flush=True)
        except Exception as error:
            wrong += 1
            outcome = None
            print(f"{cell}: {type(error).__name__}: {error}", flush=True)
        with node_tests.locked(node_tests.cache_folder() / "conversion-grid.lock"):  # others may try other cells
            known = recorded() | {cell: outcome}
            record({cell: known[cell] for cell in everything if known.get(cell)})
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
