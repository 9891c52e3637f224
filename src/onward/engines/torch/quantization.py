"""Quantisation. Rounding counts as the identity when it is differentiated, saturation as Clip.

Integers have no derivative in PyTorch. So a quantised tensor carries the levels that it was rounded from as floating
point, which `DequantizeLinear` finds there.
"""

from __future__ import annotations

import torch

from onward.engines.framework import Operators
from onward.engines.shared.quantization import broadcast_parameter
from onward.engines.torch.elementwise import cast
from onward.engines.torch.types import CODES, FLOAT8, TYPES, on_numpy

operators = Operators()


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
"""What a tensor is quantised to where nothing is said."""


def _with_levels(quantised, levels):
    if levels.requires_grad:
        quantised.levels = levels
    return quantised


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
