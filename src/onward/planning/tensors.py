"""Sizes of values: how many numbers, how many bytes."""

from __future__ import annotations

import math

import onnx_ir as ir


def dims_of(value: ir.Value | None) -> tuple[int, ...] | None:
    """The sizes of a tensor; None if one of them is not known."""
    shape = value.shape if value is not None else None
    return tuple(shape.numpy()) if shape is not None and shape.is_static() else None


def elements(value: ir.Value | None) -> int:
    """As many numbers as a tensor has; none if that is not known."""
    dims = dims_of(value)
    return 0 if dims is None else math.prod(dims)


def bytes_of(value: ir.Value) -> int:
    return math.ceil(elements(value) * value.dtype.itemsize) if value.dtype is not None else 0
