"""Elementwise operators, activations and quantization."""

from __future__ import annotations

import functools
import operator

import numpy as np
import torch
import torch.nn.functional as F

from onward.engines.framework import Operators
from onward.engines.shared import elementwise
from onward.engines.shared.elementwise import broadcast_parameter
from onward.engines.torch.types import CODES, FLOAT8, TYPES, by_bits, in_int64, narrow, on_numpy, widen

operators = Operators()
operators(Add=by_bits(operator.add), Sub=by_bits(operator.sub), Mul=by_bits(operator.mul))


@operators.define("Div")
@in_int64
def div(x, y):
    floating = any(torch.is_tensor(operand) and operand.is_floating_point() for operand in (x, y))
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


operators(
    Max=in_int64(lambda *inputs: functools.reduce(torch.maximum, inputs)),
    Min=in_int64(lambda *inputs: functools.reduce(torch.minimum, inputs)),
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
    if x.dtype == torch.uint32 and isinstance(y, np.ndarray) and direction == "RIGHT":  # the case of random numbers
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
    elif dtype == torch.float8_e4m3fn:  # PyTorch saturates here; numbers above 464 round to more than 448, the largest
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


# ---- activation ------------------------------------------------------------------------------------------------------

operators(
    Relu=torch.relu,
    LeakyRelu=lambda x, *, alpha: F.leaky_relu(x, alpha),
    PRelu=lambda x, slope: torch.where(x > 0, x, slope * x),
    Elu=lambda x, *, alpha: F.elu(x, alpha),
    Celu=lambda x, *, alpha: F.celu(x, alpha),
    Selu=lambda x, *, alpha, gamma: gamma * F.elu(x, alpha),
    Gelu=lambda x, *, approximate: F.gelu(x, approximate=approximate),
    Mish=F.mish,
)


@operators.define("Swish")
def swish(x, *, alpha):
    return F.silu(x) if alpha == 1 else x * torch.sigmoid(alpha * x)


operators(
    SwiGLU=lambda gate, x, *, alpha: swish(gate, alpha=alpha) * x,
    HardSigmoid=lambda x, *, alpha, beta: F.hardtanh(alpha * x + beta, 0, 1),
    HardSwish=lambda x: F.hardswish(x),
    Sigmoid=torch.sigmoid,
    Softplus=lambda x: F.softplus(x, threshold=40),
    Softsign=lambda x: F.softsign(x),
)


@operators.define("Shrink")
def shrink(x, *, bias, lambd):
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0)).to(x.dtype)


operators(
    ThresholdedRelu=lambda x, *, alpha: torch.where(x > alpha, x, 0),
    Softmax=lambda x, *, axis: torch.softmax(x, axis),
    LogSoftmax=lambda x, *, axis: torch.log_softmax(x, axis),
    Hardmax=lambda x, *, axis: torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1),
)


# ---- quantization ----------------------------------------------------------------------------------------------------

# The derivative treats rounding as the identity, and saturation as Clip.
#
# Integers have no derivative in PyTorch. So a quantized tensor has its levels before rounding as an
# attribute, for `DequantizeLinear`.


@operators.define("QuantizeLinear")
def quantize_linear(x, scale, zero=None, *, axis=1, block_size=0, output_dtype=0, precision=0, saturate=1):
    code = output_dtype or (_BY_DEFAULT if zero is None else CODES[zero.dtype])
    if code not in TYPES:
        attributes = {"axis": axis, "block_size": block_size, "output_dtype": output_dtype}
        return on_numpy("QuantizeLinear", x, scale, zero, **attributes, precision=precision, saturate=saturate)
    dtype = TYPES[code]
    exact = TYPES[precision] if precision else scale.dtype
    levels = x.to(exact) / broadcast_parameter(scale.to(exact), x, axis, block_size)
    if dtype not in FLOAT8:
        levels = levels + (levels.round() - levels).detach() if levels.requires_grad else levels.round()
    if zero is not None:
        levels = levels + broadcast_parameter(zero.to(exact), x, axis, block_size)
    if dtype in FLOAT8:
        return _with_levels(cast(levels, to=code, saturate=saturate), levels)
    levels = levels.clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return _with_levels(levels.to(dtype), levels)


_BY_DEFAULT = CODES[torch.uint8]
"""Default type of a quantized tensor."""


def _with_levels(quantized, levels):
    if levels.requires_grad:
        quantized.levels = levels
    return quantized


@operators.define("DequantizeLinear")
def dequantize_linear(x, scale, zero=None, *, axis=1, block_size=0, output_dtype=0):
    levels = getattr(x, "levels", x)
    if zero is not None:
        offset = broadcast_parameter(zero, x, axis, block_size)
        if not levels.is_floating_point():
            levels, offset = levels.long(), offset.long()
        levels = levels.to(scale.dtype) - offset.to(scale.dtype) if levels.is_floating_point() else levels - offset
    y = levels.to(scale.dtype) * broadcast_parameter(scale, x, axis, block_size)
    return y.to(TYPES[output_dtype]) if output_dtype else y
