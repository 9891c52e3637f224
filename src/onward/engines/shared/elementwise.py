"""Elementwise operators that frameworks have under numpy's names."""

from __future__ import annotations

import functools
import operator

import numpy as np

from onward.engines.framework import Operators
from onward.engines.shared.arrays import xp

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
    """The bytes of numbers of the type that has nothing but an exponent, from 2**-127 to 2**127, and NaN."""
    mantissa, exponent = xp.frexp(xp.abs(x.astype(np.float32)))  # in [0.5, 1), so that 0.5 is a power of two
    up = {"up": mantissa > 0.5, "down": False, "nearest": mantissa >= 0.75}[round_mode]
    exponent = xp.where(up, exponent, exponent - 1) + 127
    code = xp.clip(exponent, 0, 254) if saturate else xp.where((exponent < 0) | (exponent > 254), 255, exponent)
    code = xp.where(x == 0, 0, xp.where(xp.isinf(x), 254 if saturate else 255, code))
    return xp.where(xp.isnan(x), 255, code).astype(np.uint8)
