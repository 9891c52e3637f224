"""Convolutions."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.engines.framework import Operators
from onward.engines.shared.windows import halves, paddings, reach

operators = Operators()


@operators.define("Conv")
def conv(x, w, bias=None, *, auto_pad, dilations=None, group, pads=None, strides=None):
    return with_bias(convolved(x, w, auto_pad, dilations, group, pads, strides), bias)


def convolved(x, w, auto_pad, dilations, group, pads, strides):
    count = x.ndim - 2
    strides, dilations = strides or [1] * count, dilations or [1] * count
    amounts = paddings(auto_pad, pads, x.shape[2:], w.shape[2:], strides, dilations)
    return lax.conv_general_dilated(x, w, strides, amounts, rhs_dilation=dilations, feature_group_count=group)


def with_bias(y, bias):
    return y if bias is None else y + bias.reshape(-1, *[1] * (y.ndim - 2))


@operators.define("ConvTranspose")
def conv_transpose(
    x, w, bias=None, *, auto_pad, dilations=None, group, output_padding=None, output_shape=None, pads=None, strides=None
):
    count = x.ndim - 2
    strides, dilations, extra = strides or [1] * count, dilations or [1] * count, output_padding or [0] * count
    covered = list(map(reach, w.shape[2:], dilations))
    if output_shape is None and auto_pad.startswith("SAME"):
        output_shape = [size * stride for size, stride in zip(x.shape[2:], strides, strict=True)]
    if output_shape is None:
        removed = paddings(auto_pad, pads, x.shape[2:], w.shape[2:], strides, dilations)
    else:
        full = (
            stride * (size - 1) + more + cover
            for stride, size, more, cover in zip(strides, x.shape[2:], extra, covered, strict=True)
        )
        totals = (whole - size for whole, size in zip(full, output_shape[-count:], strict=True))
        removed = [halves(total, larger_last=auto_pad == "SAME_UPPER") for total in totals]
    amounts = [
        (cover - 1 - before, cover - 1 - after + more)
        for cover, (before, after), more in zip(covered, removed, extra, strict=True)
    ]
    grouped = w.reshape(group, w.shape[0] // group, *w.shape[1:]).swapaxes(1, 2)
    flipped = jnp.flip(grouped.reshape(-1, w.shape[0] // group, *w.shape[2:]), tuple(range(2, w.ndim)))
    y = lax.conv_general_dilated(
        x, flipped, [1] * count, amounts, lhs_dilation=strides, rhs_dilation=dilations, feature_group_count=group
    )
    return with_bias(y, bias)


@operators.define("Col2Im")
def col2im(columns, image_shape, block_shape, *, dilations=None, pads=None, strides=None):
    sizes, kernel = image_shape.tolist(), block_shape.tolist()
    count = len(sizes)
    strides, dilations = strides or [1] * count, dilations or [1] * count
    amounts = paddings("NOTSET", pads, sizes, kernel, strides, dilations)
    whole = [before + size + after for size, (before, after) in zip(sizes, amounts, strict=True)]
    blocks = [(w - reach(k, d)) // s + 1 for w, k, d, s in zip(whole, kernel, dilations, strides, strict=True)]
    n, taps = len(columns), int(np.prod(kernel))
    columns = columns.reshape(n, -1, taps, *blocks)
    image = jnp.zeros((n, columns.shape[1], *whole), columns.dtype)
    for tap, place in enumerate(itertools.product(*map(range, kernel))):
        at = tuple(
            slice(i * d, i * d + (b - 1) * s + 1, s)
            for i, d, b, s in zip(place, dilations, blocks, strides, strict=True)
        )
        image = image.at[:, :, *at].add(columns[:, :, tap])
    return image[:, :, *(slice(before, before + size) for size, (before, _) in zip(sizes, amounts, strict=True))]
