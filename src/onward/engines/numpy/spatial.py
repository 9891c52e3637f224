"""Convolutions."""

from __future__ import annotations

import math

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.types import in_float32
from onward.engines.shared.arrays import add_bias
from onward.engines.shared.windows import cut_off, paddings, reach

operators = Operators()


@operators.define("Conv")
@in_float32
def conv(x, w, b=None, *, auto_pad, dilations, group, pads, strides):
    rank = w.ndim - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    added = paddings(auto_pad, pads, x.shape[2:], w.shape[2:], strides, dilations)
    extents = list(map(reach, w.shape[2:], dilations))
    padded = np.pad(x, [(0, 0), (0, 0), *added])
    view = np.lib.stride_tricks.sliding_window_view(padded, extents, tuple(range(2, x.ndim)))
    windows = view[(..., *(slice(None, None, step) for step in (*strides, *dilations)))]
    return add_bias(_convolve(windows, w, group), b)


def _convolve(view, w, group):
    """Return the matmul of windows [N, C, *counts, *kernel] and weights [M, C / group, *kernel]."""
    rank = w.ndim - 2
    n, counts = view.shape[0], view.shape[2 : 2 + rank]
    columns = np.moveaxis(view, range(2, 2 + rank), range(-rank, 0))  # long runs last, which are copied fastest
    columns = columns.reshape(n, group, math.prod(w.shape[1:]), math.prod(counts))
    y = w.reshape(group, w.shape[0] // group, -1) @ columns
    return y.reshape(n, w.shape[0], *counts)


@operators.define("ConvTranspose")
@in_float32
def conv_transpose(x, w, b=None, *, auto_pad, dilations, group, output_padding, output_shape, pads, strides):
    rank, sizes, kernel = x.ndim - 2, x.shape[2:], w.shape[2:]
    strides, dilations, more = strides or [1] * rank, dilations or [1] * rank, output_padding or [0] * rank
    cut = cut_off(auto_pad, pads, sizes, kernel, strides, dilations, more, output_shape)
    covered = [(n - 1) * s + reach(k, d) for n, s, k, d in zip(sizes, strides, kernel, dilations, strict=True)]
    n, c = x.shape[:2]
    weights = w.reshape(group, c // group, -1).swapaxes(1, 2)
    values = (weights @ x.reshape(n, group, c // group, -1)).reshape(n, group * w.shape[1], *kernel, *sizes)
    y = np.zeros((*values.shape[:2], *covered), values.dtype)
    for offset in np.ndindex(*kernel):
        starts = [p * d for p, d in zip(offset, dilations, strict=True)]
        ends = [b + (n - 1) * s + 1 for b, n, s in zip(starts, sizes, strides, strict=True)]
        y[(..., *map(slice, starts, ends, strides))] += values[(slice(None), slice(None), *offset)]
    ends = [(-before, m - after) for (before, after), m in zip(cut, more, strict=True)]
    y = np.pad(y, [(0, 0), (0, 0), *((max(before, 0), max(after, 0)) for before, after in ends)])
    return add_bias(y[(..., *(slice(max(-before, 0), min(after, 0) or None) for before, after in ends))], b)
