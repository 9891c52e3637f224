"""Data for a page: every row as the step takes it, in as few bytes as hold it exactly."""

from __future__ import annotations

from typing import Any

import numpy as np

from onward.training.data import Batch, Batches

_DIVISORS = (1.0, 2.0, 4.0, 8.0, 10.0, 15.0, 16.0, 32.0, 64.0, 100.0, 127.0, 128.0, 255.0, 256.0)
"""What bytes are often divided by to become fractions."""
_INTEGERS = (np.uint8, np.int8, np.uint16, np.int16, np.int32)


def all_rows(batches: Batches) -> Batch:
    """All rows of data, in their order; `batches` are padded, and not shuffled."""
    parts: list[Batch] = []
    for number, batch in enumerate(batches.epoch(0)):
        count = batches.samples(number)
        parts.append({name: array[:count] for name, array in batch.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class Packer:
    """Columns, one after the other in one file, each described by what is needed to read it again."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, name: str, values: np.ndarray) -> dict[str, Any]:
        stored, divisor = _narrow(values)
        self.data += bytes(-len(self.data) % 8)  # typed arrays begin at multiples of their size
        offset = len(self.data)
        self.data += np.ascontiguousarray(stored).astype(stored.dtype.newbyteorder("<"), copy=False).tobytes()
        return {
            "name": name,
            "type": values.dtype.name,
            "shape": list(values.shape[1:]),
            "stored": stored.dtype.name,
            "divisor": divisor,
            "offset": offset,
        }


def _narrow(values: np.ndarray) -> tuple[np.ndarray, float]:
    """The same numbers in a narrower type, and what they are divided by after that. Every bit comes back."""
    if values.dtype.kind in "iu":
        for kind in _INTEGERS:
            if values.size and np.iinfo(kind).min <= values.min() and values.max() <= np.iinfo(kind).max:
                return values.astype(kind), 1.0
    if values.dtype == np.float32 and values.size and values.min() >= 0 and not np.signbit(values).any():
        for divisor in _DIVISORS:
            narrow = np.rint(values * np.float32(divisor))
            if narrow.max() <= 255 and (narrow.astype(np.float32) / np.float32(divisor) == values).all():
                return narrow.astype(np.uint8), divisor
    return values, 1.0
