"""Elementwise operators, activations and quantization."""

from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.types import in_float32, widen
from onward.engines.shared.arrays import dtype_of, is_float
from onward.engines.shared.elementwise import code_powers_of_two, quantization

operators = Operators()


@operators.define("Div")
def div(x, y):
    if is_float(x.dtype):
        return np.divide(x, y)
    return (x - np.fmod(x, y)) // y  # integers: towards zero, where `//` is towards minus infinity


@operators.define("Pow")
def power(x, y):
    if x.dtype.kind in "iu" and y.dtype.kind == "i" and (y < 0).any():  # numpy refuses these
        return np.power(x.astype(np.float64), y).astype(x.dtype)
    return np.power(x, y).astype(x.dtype, copy=False)


operators(Max=lambda *xs: functools.reduce(np.maximum, xs), Min=lambda *xs: functools.reduce(np.minimum, xs))


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
        np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz)
    )
)


def convert(x: np.ndarray, dtype: np.dtype, saturate: int = 1, round_mode: str = "up") -> np.ndarray:
    """Cast numbers or strings."""
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


# ---- activation ------------------------------------------------------------------------------------------------------


@in_float32
def gelu(x, *, approximate):
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))


@in_float32
def sigmoid(x):
    small = np.exp(-np.abs(x))  # cannot overflow
    return np.where(x >= 0, 1, small) / (1 + small)


@in_float32
def softplus(x):
    return np.logaddexp(x, x.dtype.type(0))


@in_float32
def shrink(x, *, lambd, bias):
    return np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, 0)).astype(x.dtype)


operators(
    Relu=lambda x: np.maximum(x, x.dtype.type(0)),
    LeakyRelu=in_float32(lambda x, *, alpha: np.where(x < 0, alpha * x, x)),
    PRelu=in_float32(lambda x, slope: np.where(x < 0, slope * x, x)),
    Elu=in_float32(lambda x, *, alpha: np.where(x < 0, alpha * np.expm1(x), x)),
    Celu=in_float32(lambda x, *, alpha: np.where(x < 0, alpha * np.expm1(x / alpha), x)),
    Selu=in_float32(lambda x, *, alpha, gamma: gamma * np.where(x <= 0, alpha * np.expm1(x), x)),
    Gelu=gelu,
    Mish=in_float32(lambda x: x * np.tanh(softplus(x))),
    Swish=in_float32(lambda x, *, alpha: x * sigmoid(alpha * x)),
    SwiGLU=in_float32(lambda gate, x, *, alpha: gate * sigmoid(alpha * gate) * x),
    HardSigmoid=in_float32(lambda x, *, alpha, beta: np.clip(alpha * x + beta, 0, 1)),
    HardSwish=in_float32(lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
    Sigmoid=sigmoid,
    Softplus=softplus,
    Softsign=in_float32(lambda x: x / (1 + np.abs(x))),
    Shrink=shrink,
    ThresholdedRelu=in_float32(lambda x, *, alpha: np.where(x > alpha, x, 0)),
)


@operators.define("Softmax")
def softmax(x, *, axis):
    """Compute in the type of `x`, as the function body of the standard does."""
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


@operators.define("LogSoftmax")
@in_float32
def log_softmax(x, *, axis):
    x = x - x.max(axis, keepdims=True)
    return x - np.log(np.exp(x).sum(axis, keepdims=True))


@operators.define("Hardmax")
def hardmax(x, *, axis):
    result = np.zeros_like(x)
    np.put_along_axis(result, x.argmax(axis, keepdims=True), x.dtype.type(1), axis)
    return result


# ---- quantization ----------------------------------------------------------------------------------------------------

operators(QuantizeLinear=quantization(convert))
