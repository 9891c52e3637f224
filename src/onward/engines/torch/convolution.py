"""Convolutions."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from onward.engines.framework import Operators
from onward.engines.shared.arrays import add_bias
from onward.engines.shared.windows import cut_off, paddings

operators = Operators()

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def pad(x, amounts, value=0.0):
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
        x, before = pad(x, amounts), [0] * rank
    if rank == 2:  # the layout for which there are the better kernels
        x, w = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, w))
    return _CONVOLUTIONS[rank](x, w, b, strides, before, dilations, group)


@operators.define("ConvTranspose")
def conv_transpose(
    x, w, b=None, *, auto_pad, dilations, group, kernel_shape, output_padding, output_shape, pads, strides
):
    rank = x.ndim - 2
    strides, dilations, more = strides or [1] * rank, dilations or [1] * rank, output_padding or [0] * rank
    amounts = cut_off(auto_pad, pads, x.shape[2:], w.shape[2:], strides, dilations, more, output_shape)
    fits = all(before == after >= 0 for before, after in amounts)
    if fits and all(m < s for m, s in zip(more, strides, strict=True)):
        before = [before for before, _ in amounts]
        return _TRANSPOSED[rank](x, w, b, strides, before, more, group, dilations)
    y = _TRANSPOSED[rank](x, w, None, strides, 0, 0, group, dilations)
    return add_bias(pad(y, [(-before, m - after) for (before, after), m in zip(amounts, more, strict=True)]), b)
