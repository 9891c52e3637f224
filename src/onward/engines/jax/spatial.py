"""Convolutions."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from onward.engines.framework import Operators
from onward.engines.shared.arrays import add_bias
from onward.engines.shared.windows import cut_off, paddings, reach

operators = Operators()


@operators.define("Conv")
def conv(x, w, bias=None, *, auto_pad, dilations=None, group, pads=None, strides=None):
    return add_bias(convolve(x, w, auto_pad, dilations, group, pads, strides), bias)


def convolve(x, w, auto_pad, dilations, group, pads, strides):
    count = x.ndim - 2
    strides, dilations = strides or [1] * count, dilations or [1] * count
    amounts = paddings(auto_pad, pads, x.shape[2:], w.shape[2:], strides, dilations)
    return lax.conv_general_dilated(x, w, strides, amounts, rhs_dilation=dilations, feature_group_count=group)


@operators.define("ConvTranspose")
def conv_transpose(
    x, w, bias=None, *, auto_pad, dilations=None, group, output_padding=None, output_shape=None, pads=None, strides=None
):
    count = x.ndim - 2
    strides, dilations, extra = strides or [1] * count, dilations or [1] * count, output_padding or [0] * count
    covered = list(map(reach, w.shape[2:], dilations))
    removed = cut_off(auto_pad, pads, x.shape[2:], w.shape[2:], strides, dilations, extra, output_shape)
    amounts = [
        (cover - 1 - before, cover - 1 - after + more)
        for cover, (before, after), more in zip(covered, removed, extra, strict=True)
    ]
    grouped = w.reshape(group, w.shape[0] // group, *w.shape[1:]).swapaxes(1, 2)
    flipped = jnp.flip(grouped.reshape(-1, w.shape[0] // group, *w.shape[2:]), tuple(range(2, w.ndim)))
    y = lax.conv_general_dilated(
        x, flipped, [1] * count, amounts, lhs_dilation=strides, rhs_dilation=dilations, feature_group_count=group
    )
    return add_bias(y, bias)
