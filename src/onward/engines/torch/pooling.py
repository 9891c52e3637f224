"""Pools."""

from __future__ import annotations

import functools
import math

import torch
from torch.nn import functional as F

from onward.engines.framework import Operators
from onward.engines.shared.pooling import count_elements, place_windows, sum_windows
from onward.engines.torch.convolution import pad

operators = Operators()

_MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _takes(amounts, kernel):
    """Whether PyTorch's pools take this padding."""
    return all(before == after <= size // 2 for (before, after), size in zip(amounts, kernel, strict=True))


@operators.define("MaxPool")
def max_pool(x, *, auto_pad, ceil_mode, dilations, kernel_shape, pads, storage_order, strides, outputs):
    _, strides, dilations, _, amounts = place_windows(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    pool, y = _MAX_POOLS[len(kernel_shape)], x if x.is_floating_point() else x.float()
    before = [before for before, _ in amounts]
    if not _takes(amounts, kernel_shape):
        y, before = pad(y, amounts, -torch.inf), [0] * len(kernel_shape)
    if outputs == 1:
        return pool(y, kernel_shape, strides, before, dilations).to(x.dtype)
    sizes = y.shape[2:]
    y, places = pool(y, kernel_shape, strides, before, dilations, return_indices=True)
    shifts = [begin if size > old else 0 for (begin, _), size, old in zip(amounts, sizes, x.shape[2:], strict=True)]
    return y.to(x.dtype), _flat_places(places, sizes, shifts, x.shape, storage_order)


def _flat_places(places, sizes, shifts, shape, storage_order):
    """Places in images of `sizes` as those in the whole tensor, without what was added to them."""
    positions = []
    for size, shift in zip(reversed(sizes), reversed(shifts), strict=True):
        positions.insert(0, places % size - shift)
        places = places // size
    order = list(range(len(positions)))
    if storage_order:  # the last axis is the slowest
        order.reverse()
    flat = functools.reduce(lambda sum, i: sum * shape[2 + i] + positions[i], order, torch.zeros_like(places))
    planes = torch.arange(shape[0] * shape[1], device=places.device).reshape(*shape[:2], *[1] * len(sizes))
    return flat + planes * math.prod(shape[2:])


@operators.define("AveragePool")
def average_pool(x, *, auto_pad, ceil_mode, count_include_pad, dilations, kernel_shape, pads, strides):
    windows = place_windows(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    if set(windows.dilations) == {1} and windows.added == windows.asked and _takes(windows.added, kernel_shape):
        before = [before for before, _ in windows.added]
        pool = _AVERAGE_POOLS[len(kernel_shape)]
        return pool(x, kernel_shape, windows.strides, before, count_include_pad=bool(count_include_pad))
    return sum_windows(x, windows) / torch.from_numpy(count_elements(x, windows, count_include_pad)).to(x)


def _globally(function):
    def pool(x, **attributes):
        return function(x.flatten(2), **attributes).reshape(*x.shape[:2], *[1] * (x.ndim - 2))

    return functools.wraps(function)(pool)


operators(
    GlobalMaxPool=_globally(lambda x: x.max(2).values),
    GlobalAveragePool=_globally(lambda x: x.mean(2)),
    GlobalLpPool=_globally(lambda x, *, p: torch.linalg.vector_norm(x, p, 2)),
)
