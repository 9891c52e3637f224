"""Elementwise operators."""

from __future__ import annotations

import functools
import operator

import numpy as np
import torch
import torch.nn.functional as F

from onward.engines.framework import Operators
from onward.engines.shared import elementwise
from onward.engines.torch.types import CODES, FLOAT8, TYPES, by_bits, in_int64, narrow, on_numpy, widen

operators = Operators()
operators(
    Add=by_bits(operator.add),
    Sub=by_bits(operator.sub),
    Mul=by_bits(operator.mul),
)


@operators.define("Div")
@in_int64
def div(x, y):
    floating = any(torch.is_tensor(part) and part.is_floating_point() for part in (x, y))
    return x / y if floating else torch.div(x, y, rounding_mode="trunc")


@operators.define("Mod")
@in_int64
def mod(x, y, *, fmod):
    return torch.fmod(x, y) if fmod else torch.remainder(x, y)


@operators.define("Pow")
@in_int64
def power(x, y):
    if x.is_floating_point():
        return torch.pow(x, y).to(x.dtype)
    return torch.pow(x.double(), y).to(x.dtype)


@operators.define("Max")
@in_int64
def maximum(*inputs):
    return functools.reduce(torch.maximum, inputs)


@operators.define("Min")
@in_int64
def minimum(*inputs):
    return functools.reduce(torch.minimum, inputs)


operators(
    Abs=lambda x: torch.abs(x) if x.dtype.is_signed else x,
    Sign=in_int64(torch.sign),
    Erf=torch.erf,
    Equal=by_bits(operator.eq),
    Greater=in_int64(operator.gt),
    GreaterOrEqual=in_int64(operator.ge),
    Less=in_int64(operator.lt),
    LessOrEqual=in_int64(operator.le),
)


@operators.define("IsInf")
def is_inf(x, *, detect_negative, detect_positive):
    wide = x.float() if x.dtype in FLOAT8 else x
    return elementwise.is_inf(wide, detect_negative=detect_negative, detect_positive=detect_positive)


operators(
    IsNaN=lambda x: torch.isnan(x.float() if x.dtype in FLOAT8 else x),
    Where=by_bits(torch.where),
    BitwiseAnd=by_bits(torch.bitwise_and),
    BitwiseOr=by_bits(torch.bitwise_or),
    BitwiseXor=by_bits(torch.bitwise_xor),
    BitwiseNot=by_bits(torch.bitwise_not),
)


@operators.define("BitShift")
def bit_shift(x, y, *, direction):
    if x.dtype == torch.uint32 and isinstance(y, np.ndarray) and direction == "RIGHT":  # as random numbers need it
        mask = (1 << 32 - y.item()) - 1
        return ((x.view(torch.int32) >> y.item()) & mask).view(x.dtype) if y else x
    return _shift(x, y, direction=direction)


@in_int64
def _shift(x, y, *, direction):
    return x << y if direction == "LEFT" else x >> y


operators.define("onward.StopGradient")(torch.detach)


@operators.define("Cast")
def cast(x, *, to, saturate=1, round_mode="up"):
    dtype = TYPES.get(to)
    if dtype is None:
        return on_numpy("Cast", x, to=to, saturate=saturate, round_mode=round_mode)
    if dtype in FLOAT8 and saturate:
        largest = torch.finfo(dtype).max
        x = (x if x.is_floating_point() else x.float()).clamp(-largest, largest)
    elif dtype == torch.float8_e4m3fn:  # which PyTorch saturates; 464 is where rounding leads out of range
        x = torch.where(x.abs() > 464, torch.nan, x)
    x = widen(x)
    return narrow(x.long(), dtype) if dtype in (torch.uint16, torch.uint32) else x.to(dtype)


@operators.define("CastLike")
def cast_like(x, like, *, saturate, round_mode):
    return cast(x, to=CODES[like.dtype], saturate=saturate, round_mode=round_mode)


@operators.define("BitCast")
def bit_cast(x, *, to):
    return x.view(TYPES[to]) if to in TYPES else on_numpy("BitCast", x, to=to)


@operators.define("Clip")
@in_int64
def clip(x, low=None, high=None, *, is_relu6=False):
    if is_relu6:
        return F.relu6(x)
    if low is not None and high is not None and torch.is_tensor(low) != torch.is_tensor(high):
        x, low = torch.clamp(x, low), None  # PyTorch takes two numbers, or two tensors
    return x if low is None and high is None else torch.clamp(x, low, high)
