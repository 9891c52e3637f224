"""Elementwise operators."""

from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.precision import in_float32, widen
from onward.engines.shared.arrays import dtype_of, is_float
from onward.engines.shared.elementwise import code_powers_of_two

operators = Operators()


@operators.define("Div")
def div(x, y):
    if is_float(x.dtype):
        return np.divide(x, y)
    return (x - np.fmod(x, y)) // y  # integers: towards zero, where `//` is towards minus infinity


@operators.define("Pow")
def power(x, y):
    if x.dtype.kind in "iu" and y.dtype.kind == "i" and (y < 0).any():  # which numpy refuses
        return np.power(x.astype(np.float64), y).astype(x.dtype)
    return np.power(x, y).astype(x.dtype, copy=False)


operators(
    Max=lambda *xs: functools.reduce(np.maximum, xs),
    Min=lambda *xs: functools.reduce(np.minimum, xs),
)


@operators.define("Erf")
@in_float32
def erf(x):
    return np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype)


operators(Round=np.rint)


@operators.define("BitShift")
def bit_shift(x, y, *, direction):
    bits = 8 * x.dtype.itemsize
    if direction == "LEFT":
        return np.where((y < 0) | (y >= bits), x.dtype.type(0), np.left_shift(x, y))
    return np.right_shift(x, np.where(y < 0, x.dtype.type(bits - 1), np.minimum(y, x.dtype.type(bits))))


operators.define("onward.StopGradient")(lambda x: x)


@operators.define("Cast")
def cast(x, *, to, saturate, round_mode):
    return convert(x, dtype_of(to), saturate, round_mode)


@operators.define("CastLike")
def cast_like(x, like, *, saturate, round_mode):
    return convert(x, like.dtype, saturate, round_mode)


@operators.define("BitCast")
def bit_cast(x, *, to):
    return x.view(dtype_of(to))


@operators.define("Clip")
def clip(x, low=None, high=None):
    x = x if low is None else np.maximum(x, low)
    return x if high is None else np.minimum(x, high)


# ---- conversion ------------------------------------------------------------------------------------------------------

_SATURATING = frozenset(
    map(
        np.dtype,
        (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz),
    )
)


def convert(x: np.ndarray, dtype: np.dtype, saturate: int = 1, round_mode: str = "up") -> np.ndarray:
    """Numbers or text as another type."""
    if dtype == x.dtype:
        return x
    if dtype.kind in "OU":
        return x.astype(np.str_).astype(object)
    if x.dtype.kind in "OU":
        x = x.astype(np.str_).astype(np.float64 if is_float(dtype) else dtype)
    if dtype in _SATURATING and saturate:
        largest = float(ml_dtypes.finfo(dtype).max)
        x = np.clip(widen(x), -largest, largest)
    elif dtype == ml_dtypes.float8_e8m0fnu:
        return code_powers_of_two(x, saturate, round_mode).view(dtype)
    return x.astype(dtype)
