"""Convolutions."""

from __future__ import annotations

import math

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.precision import in_float32
from onward.engines.numpy.windows import Windows, halves, windows

operators = Operators()


@operators.define("Conv")
@in_float32
def conv(x, w, b=None, *, auto_pad, dilations, group, pads, strides):
    where = windows(x.shape[2:], w.shape[2:], auto_pad=auto_pad, dilations=dilations, pads=pads, strides=strides)
    return _with_bias(convolve(where.of(x), w, group), b)


def convolve(view, w, group):
    """The product of windows [N, C, *counts, *kernel] with weights [M, C / group, *kernel]."""
    rank = w.ndim - 2
    n, counts = view.shape[0], view.shape[2 : 2 + rank]
    columns = np.moveaxis(view, range(2, 2 + rank), range(-rank, 0))  # the longest runs last: they are copied fastest
    columns = columns.reshape(n, group, math.prod(w.shape[1:]), math.prod(counts))
    y = w.reshape(group, w.shape[0] // group, -1) @ columns
    return y.reshape(n, w.shape[0], *counts)


@operators.define("ConvTranspose")
@in_float32
def conv_transpose(x, w, b=None, *, auto_pad, dilations, group, output_padding, output_shape, pads, strides):
    rank, sizes = x.ndim - 2, x.shape[2:]
    begins, ends = halves(pads, rank)
    where = Windows(w.shape[2:], strides or [1] * rank, dilations or [1] * rank, begins, sizes)
    full = [n + more for n, more in zip(where.covered, output_padding or [0] * rank, strict=True)]
    if output_shape or auto_pad.startswith("SAME"):
        shape = output_shape or [n * s for n, s in zip(sizes, where.strides, strict=True)]
        cut = [max(n - wanted, 0) for n, wanted in zip(full, shape, strict=True)]
        where.begins = [c // 2 if auto_pad == "SAME_UPPER" else c - c // 2 for c in cut]
    else:
        shape = [n - begin - end for n, begin, end in zip(full, begins, ends, strict=True)]
    n, c = x.shape[:2]
    grouped = x.reshape(n, group, c // group, -1)
    weights = w.reshape(group, c // group, -1).swapaxes(1, 2)
    values = (weights @ grouped).reshape(n, group * w.shape[1], math.prod(w.shape[2:]), -1).swapaxes(2, 3)
    return _with_bias(where.sum(values.reshape(n, -1, *sizes, *w.shape[2:]), shape), b)


def _with_bias(y, b):
    return y if b is None else y + b.reshape(-1, *[1] * (y.ndim - 2))
