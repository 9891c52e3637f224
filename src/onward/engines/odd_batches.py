"""Batches that a step is not compiled for: the last one of an epoch is smaller than the others, and comes once in it.

To compile takes as long for it as for all others together. It runs operator by operator, which gives the same numbers
up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]
_IN_A_ROW = 3
"""So many of the same size are no rest: whoever trains has gone on to smaller batches."""


class OddBatches:
    """Says of each batch whether it is one. `rows` is how many a whole batch has, where that is known beforehand.

    Then what becomes of a batch depends on its size alone, as it must where a run goes on in another process. Else a
    batch is odd that is like an earlier one but for fewer rows.
    """

    def __init__(self, rows: Callable[[], int | None]):
        self._rows = rows
        self._whole: list[Shapes] = []
        self._last: Shapes | None = None
        self._count = 0

    def __call__(self, batch: Mapping[str, Any]) -> bool:
        shapes = {name: tuple(array.shape) for name, array in batch.items()}
        if (rows := self._rows()) is not None:
            return max((shape[0] for shape in shapes.values() if shape), default=rows) < rows
        self._count = self._count + 1 if shapes == self._last else 1
        self._last = shapes
        if shapes in self._whole:
            return False
        if self._count < _IN_A_ROW and any(_has_fewer_rows(shapes, whole) for whole in self._whole):
            return True
        self._whole.append(shapes)
        return False


def _has_fewer_rows(shapes: Shapes, whole: Shapes) -> bool:
    """Whether the first axes are smaller, where they differ, and the others are the same."""
    pairs = [(shape, whole[name]) for name, shape in shapes.items()]
    return any(shape != other for shape, other in pairs) and all(
        shape[1:] == other[1:] and shape[:1] <= other[:1] for shape, other in pairs
    )
