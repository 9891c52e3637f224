"""Elementwise operators and quantization."""

from __future__ import annotations

import functools
import math
import operator

import ml_dtypes
import numpy as np

from onward.engines.framework import Operators
from onward.engines.shared.arrays import dtype_of, is_float, xp

operators = Operators()

operators(
    Add=xp.add,
    Sub=xp.subtract,
    Mul=xp.multiply,
    Mod=lambda x, y, *, fmod: xp.fmod(x, y) if fmod else xp.remainder(x, y),
    Sum=lambda *xs: functools.reduce(operator.add, xs),
    Mean=lambda *xs: functools.reduce(operator.add, xs) / len(xs),
    Abs=xp.abs,
    Neg=xp.negative,
    Sign=xp.sign,
    Reciprocal=xp.reciprocal,
    Sqrt=xp.sqrt,
    Exp=xp.exp,
    Log=xp.log,
    Ceil=xp.ceil,
    Floor=xp.floor,
    Round=xp.round,
    Sin=xp.sin,
    Cos=xp.cos,
    Tan=xp.tan,
    Asin=xp.arcsin,
    Acos=xp.arccos,
    Atan=xp.arctan,
    Sinh=xp.sinh,
    Cosh=xp.cosh,
    Tanh=xp.tanh,
    Asinh=xp.arcsinh,
    Acosh=xp.arccosh,
    Atanh=xp.arctanh,
    Equal=xp.equal,
    Greater=xp.greater,
    GreaterOrEqual=xp.greater_equal,
    Less=xp.less,
    LessOrEqual=xp.less_equal,
    And=xp.logical_and,
    Or=xp.logical_or,
    Xor=xp.logical_xor,
    Not=xp.logical_not,
)


@operators.define("IsInf")
def is_inf(x, *, detect_negative, detect_positive):
    if detect_negative and detect_positive:
        return xp.isinf(x)
    return xp.isinf(x) & ((x > 0) & bool(detect_positive) | (x < 0) & bool(detect_negative))


operators(
    IsNaN=xp.isnan,
    Where=xp.where,
    BitwiseAnd=xp.bitwise_and,
    BitwiseOr=xp.bitwise_or,
    BitwiseXor=xp.bitwise_xor,
    BitwiseNot=xp.bitwise_not,
    Identity=lambda x: x,
)


def code_powers_of_two(x, saturate, round_mode):
    """Encode numbers as float8_e8m0fnu: only an exponent, from 2**-127 to 2**127, and NaN."""
    mantissa, exponent = xp.frexp(xp.abs(x.astype(np.float32)))  # in [0.5, 1), so that 0.5 is a power of two
    up = {"up": mantissa > 0.5, "down": False, "nearest": mantissa >= 0.75}[round_mode]
    exponent = xp.where(up, exponent, exponent - 1) + 127
    code = xp.clip(exponent, 0, 254) if saturate else xp.where((exponent < 0) | (exponent > 254), 255, exponent)
    code = xp.where(x == 0, 0, xp.where(xp.isinf(x), 254 if saturate else 255, code))
    return xp.where(xp.isnan(x), 255, code).astype(np.uint8)


# ---- quantization ----------------------------------------------------------------------------------------------------


def broadcast_parameter(parameter, x, axis, block_size):
    """Reshape a scale or zero point (scalar, per axis index or per block) to broadcast with x."""
    if math.prod(parameter.shape) == 1:
        return xp.reshape(parameter, ())
    if block_size:
        return xp.repeat(parameter, block_size, axis)[tuple(map(slice, x.shape))]
    rank = len(x.shape)
    return xp.reshape(parameter, [-1 if i == axis % rank else 1 for i in range(rank)])


def quantization(convert):
    """Return QuantizeLinear with a function that casts, with or without saturation."""

    def quantize(x, scale, zero=None, *, axis, block_size, output_dtype, precision, saturate):
        exact = dtype_of(precision) if precision else scale.dtype
        dtype = zero.dtype if zero is not None else dtype_of(output_dtype) if output_dtype else np.dtype(np.uint8)
        steps = x.astype(exact) / broadcast_parameter(scale, x, axis, block_size).astype(exact)
        floats = is_float(dtype)
        steps = steps if floats else xp.rint(steps).astype(np.float32)
        if zero is not None:
            steps = steps + broadcast_parameter(zero, x, axis, block_size).astype(steps.dtype)
        if floats:
            return convert(steps, dtype, saturate=saturate)
        limits = ml_dtypes.iinfo(dtype)
        return xp.clip(steps, float(limits.min), float(limits.max)).astype(np.int32).astype(dtype)

    return quantize


@operators.define("DequantizeLinear")
def dequantize(x, scale, zero=None, *, axis, block_size, output_dtype):
    levels = x.astype(np.float32 if is_float(x.dtype) else np.int32)
    if zero is not None:
        levels = levels - broadcast_parameter(zero, x, axis, block_size).astype(levels.dtype)
    exact = np.promote_types(scale.dtype, np.float32)
    y = levels.astype(exact) * broadcast_parameter(scale, x, axis, block_size).astype(exact)
    return y.astype(dtype_of(output_dtype) if output_dtype else scale.dtype)
