"""Operators that move elements, or make them of nothing."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional as F

from onward.engines.framework import Operators
from onward.engines.shared import movement
from onward.engines.shared.movement import cut_for_pad
from onward.engines.torch.types import TYPES, by_bits, from_array, has_type

operators = Operators()


@operators.define("Pad")
@by_bits
def pad(x, pads, value=None, axes=None, *, mode):
    x, widths = cut_for_pad(x, pads, axes)
    if mode != "constant":
        for axis, width in enumerate(widths):
            if any(width):
                places = np.pad(np.arange(x.shape[axis]), width, mode)
                x = x.index_select(axis, torch.from_numpy(places).to(x.device))
        return x
    flat = [amount for pair in reversed(widths) for amount in pair]
    if not torch.is_tensor(value):
        return F.pad(x, flat, value=value)
    return torch.where(F.pad(torch.ones_like(x, dtype=torch.bool), flat), F.pad(x, flat), value)


operators(Trilu=by_bits(movement.trilu))


@operators.define("ConstantOfShape")
def constant_of_shape(shape, *, value, device="cpu"):
    value = np.zeros(1, np.float32) if value is None else value
    if not has_type(value.dtype):
        return np.full(shape.tolist(), value)
    return from_array(value).to(device).expand(*shape.tolist(), 1).squeeze(-1)


@operators.define("EyeLike")
def eye_like(x, *, dtype, k):
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
    return (columns - rows[:, None] == k).to(x.dtype if dtype is None else TYPES[dtype])


@operators.define("Range")
def range_(start, limit, delta, *, device="cpu"):
    """The first as it is, and the others from it, as the standard counts them."""
    count = max(0, math.ceil((limit.item() - start.item()) / delta.item()))
    step, first = (from_array(value).to(device) for value in (delta, start))
    return (torch.arange(count, device=device) * step + first).to(first.dtype)
