"""Convolutions."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from onward.engines.framework import Operators
from onward.engines.shared.windows import halves, paddings, reach

operators = Operators()

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def padded(x, amounts, value=0.0):
    """With (before, after) more along the spatial axes; fewer where these are negative."""
    flat = [amount for pair in reversed(amounts) for amount in pair]
    return F.pad(x, flat, value=value) if any(flat) else x


@operators.define("Conv")
def conv(x, w, b=None, *, auto_pad, dilations, group, kernel_shape, pads, strides):
    rank = x.ndim - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    amounts = paddings(auto_pad, pads, x.shape[2:], w.shape[2:], strides, dilations)
    if all(before == after for before, after in amounts):
        before = [before for before, _ in amounts]
    else:
        x, before = padded(x, amounts), [0] * rank
    if rank == 2:  # the layout for which there are the better kernels
        x, w = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, w))
    return _CONVOLUTIONS[rank](x, w, b, strides, before, dilations, group)


@operators.define("ConvTranspose")
def conv_transpose(
    x, w, b=None, *, auto_pad, dilations, group, kernel_shape, output_padding, output_shape, pads, strides
):
    rank = x.ndim - 2
    strides, dilations, more = strides or [1] * rank, dilations or [1] * rank, output_padding or [0] * rank
    if output_shape is None and auto_pad.startswith("SAME"):
        output_shape = [size * stride for size, stride in zip(x.shape[2:], strides, strict=True)]
    if output_shape:
        reaches = map(reach, w.shape[2:], dilations)
        whole = [(size - 1) * s + r + m for size, s, r, m in zip(x.shape[2:], strides, reaches, more, strict=True)]
        totals = [size - wanted for size, wanted in zip(whole, output_shape, strict=True)]
        amounts = [halves(total, larger_last=auto_pad == "SAME_UPPER") for total in totals]
    else:
        amounts = paddings("NOTSET", pads, x.shape[2:], w.shape[2:], strides, dilations)
    fits = all(before == after >= 0 for before, after in amounts)
    if fits and all(m < s for m, s in zip(more, strides, strict=True)):
        before = [before for before, _ in amounts]
        return _TRANSPOSED[rank](x, w, b, strides, before, more, group, dilations)
    y = _TRANSPOSED[rank](x, w, None, strides, 0, 0, group, dilations)
    y = padded(y, [(-before, m - after) for (before, after), m in zip(amounts, more, strict=True)])
    return y if b is None else y + b.reshape(-1, *[1] * rank)


@operators.define("Col2Im")
def col2im(x, image_shape, block_shape, *, dilations, pads, strides):
    """A transposed convolution, whose kernels put one element of a block each."""
    sizes, block = image_shape.tolist(), block_shape.tolist()
    rank, taps = len(sizes), math.prod(block)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    amounts = paddings("NOTSET", pads, sizes, block, strides, dilations)
    numbers = zip(sizes, amounts, map(reach, block, dilations), strides, strict=True)
    places = [(size + sum(amount) - covered) // stride + 1 for size, amount, covered, stride in numbers]
    kernels = torch.eye(taps, dtype=x.dtype, device=x.device).reshape(taps, 1, *block)
    columns = x.reshape(-1, taps, *places)
    y = torch.convolution(columns, kernels, None, strides, [0] * rank, dilations, True, [0] * rank, 1)
    ends = [size + before for size, (before, _) in zip(sizes, amounts, strict=True)]
    crop = [(-before, end - whole) for (before, _), end, whole in zip(amounts, ends, y.shape[2:], strict=True)]
    return padded(y, crop).reshape(x.shape[0], -1, *sizes)
