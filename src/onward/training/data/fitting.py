"""Whether a column can be an input of a model, and how: conversions that keep the meaning, shapes with one reading."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onward.training.data.dataset import Batch, Column


@dataclass(frozen=True)
class Wanted:
    """What an input takes per sample."""

    dtype: np.dtype
    shape: tuple[int | None, ...] | None  # None: whatever comes

    @classmethod
    def by(cls, value: Any) -> Wanted:
        """By an input: something with a `dtype` (of onnx_ir) and a `shape` that begins with the batch."""
        shape = None
        if value.shape is not None:
            shape = tuple(dim if isinstance(dim, int) else None for dim in list(value.shape)[1:])
        return cls(np.dtype(value.dtype.numpy()), shape)

    def __str__(self) -> str:
        return f"{self.dtype.name}[...]" if self.shape is None else str(Column(self.dtype, self.shape))


@dataclass(frozen=True)
class Binding:
    """How an input is made of columns."""

    columns: tuple[str, ...]  # several: numbers that together are one row
    dtype: np.dtype | None = None  # None: as it is
    shape: tuple[int, ...] | None = None  # of a sample; None: as it is
    classes: tuple[str, ...] | None = None
    texts: tuple[str, ...] | None = None  # what numbers stand for, where the input takes text
    length: int | None = None  # of text that is given as so many bytes
    note: str = ""  # what a user should know

    def __call__(self, batch: Batch) -> np.ndarray:
        parts = [batch[name] for name in self.columns]
        values = parts[0] if len(parts) == 1 else np.stack(parts, axis=1)
        if self.shape is not None:
            values = values.reshape(len(values), *self.shape)
        if self.texts is not None:
            values = np.asarray(self.texts, object)[values]
        if self.dtype is None or self.dtype == values.dtype:
            return values
        if self.length is not None:
            return _as_bytes(values, self.length)
        return values.astype(self.dtype)


def fit(names: Sequence[str], columns: Mapping[str, Column], wanted: Wanted, is_named: bool = False) -> Binding | None:
    """How these columns, side by side if there are several, make what is wanted; None if they do not.

    `is_named`: that it is these is certain, so that two classes may be no and yes, 0 and 1.
    """
    parts = [columns[name] for name in names]
    if (length := _text_length(wanted)) is not None and len(parts) == 1 and _is_text(parts[0]):
        return Binding(tuple(names), wanted.dtype, texts=parts[0].classes, length=length)
    if not all(_converts(part, wanted.dtype, is_named) for part in parts):
        return None
    if len(parts) > 1 and any(part.shape for part in parts):
        return None
    given = parts[0].shape if len(parts) == 1 else (len(parts),)
    shape = None
    if wanted.shape is not None and not _is_same(given, wanted.shape):
        shape = _reshape_to(given, wanted.shape)
        if shape is None:
            return None
    note = ""
    if parts[0].dtype == np.uint8 and is_float(wanted.dtype):
        note = f"`{names[0]}` is given as it is, 0 to 255, not scaled"
    if wanted.dtype.kind == "O":
        return Binding(tuple(names), wanted.dtype, shape, texts=parts[0].classes)
    return Binding(tuple(names), wanted.dtype, shape, parts[0].classes, note=note)


def is_float(dtype: np.dtype) -> bool:
    return "float" in dtype.name  # bfloat16 and its like are of no kind that numpy knows


def _converts(column: Column, wanted: np.dtype, is_named: bool) -> bool:
    """Whether a conversion keeps the meaning: never of fractions to whole numbers, nor of classes to amounts.

    Whole numbers may become narrower: each batch is checked.
    """
    given = column.dtype
    if wanted.kind == "O":
        return _is_text(column)
    if column.classes is not None:
        return wanted.kind in "iu" or (is_named and is_float(wanted) and len(column.classes) == 2)
    if given.kind in "USO":
        return False
    if is_float(wanted):
        return is_float(given) or given.kind in "iub"
    if wanted.kind in "iu":
        return given.kind in "iub"
    return given == wanted


def _is_text(column: Column) -> bool:
    return not column.shape and (column.dtype.kind in "UO" or column.classes is not None)


def _text_length(wanted: Wanted) -> int | None:
    """How many bytes of text an input takes, if that is what it takes: a row of them."""
    is_row = wanted.dtype == np.uint8 and wanted.shape is not None and len(wanted.shape) == 1
    length = wanted.shape[0] if is_row and wanted.shape is not None else None
    return length if length is not None and length > 1 else None


def _as_bytes(texts: np.ndarray, length: int) -> np.ndarray:
    """Text in UTF-8, cut off or filled up with 0."""
    rows = [str(text).encode()[:length].ljust(length, b"\0") for text in texts]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), length).copy()


def _is_same(given: tuple[int | None, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(given) == len(wanted) and all(b is None or a == b for a, b in zip(given, wanted, strict=True))


def _reshape_to(given: tuple[int | None, ...], wanted: tuple[int | None, ...]) -> tuple[int, ...] | None:
    """The wanted shape, if values in their order can mean only that: one of both is flat, or only ones differ."""
    old = tuple(dim for dim in given if dim is not None)
    new = tuple(dim for dim in wanted if dim is not None)
    if len(old) != len(given) or len(new) != len(wanted) or math.prod(old) != math.prod(new):
        return None
    is_flat = len(old) == 1 or len(new) == 1
    return new if is_flat or [dim for dim in old if dim != 1] == [dim for dim in new if dim != 1] else None
