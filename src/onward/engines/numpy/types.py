"""Narrow floats, and the limits of types."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from onward.engines.framework import Function
from onward.engines.shared.arrays import is_float


def is_narrow(dtype: np.dtype) -> bool:
    """True for floats of fewer than 32 bits."""
    return dtype.itemsize < 4 and is_float(dtype)


def lowest(dtype: np.dtype) -> Any:
    """Return the lowest value of a type: -inf for floats."""
    if dtype.kind == "b":
        return False
    return -np.inf if is_float(dtype) else ml_dtypes.iinfo(dtype).min


def highest(dtype: np.dtype) -> Any:
    """Return the highest value of a type: inf for floats."""
    if dtype.kind == "b":
        return True
    return np.inf if is_float(dtype) else ml_dtypes.iinfo(dtype).max


def widen(value: Any) -> Any:
    """Cast arrays of narrow floats to float32."""
    return value.astype(np.float32) if isinstance(value, np.ndarray) and is_narrow(value.dtype) else value


def in_float32(function: Function) -> Function:
    """Wrap a function to compute narrow floats in float32, and to round results once."""

    @functools.wraps(function)
    def compute(x, *others, **attributes):
        if not is_narrow(x.dtype):
            return function(x, *others, **attributes)
        results = function(widen(x), *map(widen, others), **attributes)
        return tuple(_round(y, x.dtype) for y in results) if isinstance(results, tuple) else _round(results, x.dtype)

    return compute


def _round(y: Any, dtype: np.dtype) -> Any:
    return y.astype(dtype) if y is not None and y.dtype.kind == "f" else y
