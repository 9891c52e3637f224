"""Types that numpy itself lacks, and how narrow floats are computed."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from onward.engines.framework import Function
from onward.engines.shared.arrays import is_float


def is_narrow(dtype: np.dtype) -> bool:
    """Whether a type is one of floats of fewer than 32 bits."""
    return dtype.itemsize < 4 and is_float(dtype)


def lowest(dtype: np.dtype) -> Any:
    """What is not greater than any number."""
    if dtype.kind == "b":
        return False
    return -np.inf if is_float(dtype) else ml_dtypes.iinfo(dtype).min


def highest(dtype: np.dtype) -> Any:
    """What is not less than any number."""
    if dtype.kind == "b":
        return True
    return np.inf if is_float(dtype) else ml_dtypes.iinfo(dtype).max


def widen(value: Any) -> Any:
    """Narrow floats as float32; all else as it is."""
    return value.astype(np.float32) if isinstance(value, np.ndarray) and is_narrow(value.dtype) else value


def in_float32(function: Function) -> Function:
    """A function that computes narrow floats in float32, and rounds once, to the type of its first input."""

    @functools.wraps(function)
    def compute(x, *others, **attributes):
        if not is_narrow(x.dtype):
            return function(x, *others, **attributes)
        results = function(widen(x), *map(widen, others), **attributes)
        return tuple(_round(y, x.dtype) for y in results) if isinstance(results, tuple) else _round(results, x.dtype)

    return compute


def _round(y: Any, dtype: np.dtype) -> Any:
    return y.astype(dtype) if y is not None and y.dtype.kind == "f" else y
