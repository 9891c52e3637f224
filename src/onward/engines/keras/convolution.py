"""Convolutions. Channels come second; on TensorFlow's CPUs they must come last."""

from __future__ import annotations

import keras
from keras import ops

from onward.engines.framework import Operators
from onward.engines.keras.movement import pad
from onward.engines.shared.windows import cut_off, paddings, reach

operators = Operators()


def on_windows(function, x, amounts, fill=0):
    """What a function of a tensor and its layout makes of a tensor with something around it."""
    around = [(0, 0), (0, 0), *amounts]
    last = keras.backend.backend() == "tensorflow"
    if last:
        x, around = ops.moveaxis(x, 1, -1), [(0, 0), *amounts, (0, 0)]
    if any(any(amount) for amount in amounts):
        x = ops.pad(x, around, constant_values=fill)
    y = function(x, "channels_last" if last else "channels_first")
    return ops.moveaxis(y, -1, 1) if last else y


@operators.define("Conv")
def conv(x, w, bias=None, *, auto_pad="NOTSET", dilations=None, group=1, pads=None, strides=None):
    count = len(x.shape) - 2
    strides, dilations = strides or [1] * count, dilations or [1] * count
    amounts = paddings(auto_pad, pads, x.shape[2:], w.shape[2:], strides, dilations)
    if max(strides) > 1 and max(dilations) > 1:  # which TensorFlow does not do at once
        w, dilations = spread_elements(w, dilations), [1] * count
    kernel = ops.transpose(w, (*range(2, count + 2), 1, 0))

    def convolved(x, layout):
        y = ops.conv(x, kernel, tuple(strides), "valid", layout, tuple(dilations))
        if bias is None:
            return y
        return y + (bias if layout == "channels_last" else ops.reshape(bias, (-1, *[1] * count)))

    return on_windows(convolved, x, amounts)


@operators.define("ConvTranspose")
def conv_transpose(
    x,
    w,
    bias=None,
    *,
    auto_pad="NOTSET",
    dilations=None,
    group=1,
    output_padding=None,
    output_shape=None,
    pads=None,
    strides=None,
):
    count, sizes = len(x.shape) - 2, x.shape[2:]
    strides, dilations, extra = strides or [1] * count, dilations or [1] * count, output_padding or [0] * count
    covered = list(map(reach, w.shape[2:], dilations))
    removed = cut_off(auto_pad, pads, sizes, w.shape[2:], strides, dilations, extra, output_shape)
    before = [cover - 1 - first for cover, (first, _) in zip(covered, removed, strict=True)]
    after = [cover - 1 - last + more for cover, (_, last), more in zip(covered, removed, extra, strict=True)]
    wide = pad(spread_elements(x, strides), [0, 0, *before, 0, 0, *after])
    grouped = ops.swapaxes(ops.reshape(w, (group, w.shape[0] // group, *w.shape[1:])), 1, 2)
    flipped = ops.flip(ops.reshape(grouped, (-1, w.shape[0] // group, *w.shape[2:])), tuple(range(2, count + 2)))
    return conv(wide, flipped, bias, dilations=dilations, group=group)


def spread_elements(x, strides):
    """Zeros between the elements of the last axes."""
    for axis, stride in enumerate(strides, 2):
        if stride > 1:
            size, rest = x.shape[axis], x.shape[axis + 1 :]
            apart = ops.pad(
                ops.expand_dims(x, axis + 1), [(0, (stride - 1) * (i == axis + 1)) for i in range(len(x.shape) + 1)]
            )
            joined = ops.reshape(apart, (-1, *x.shape[1:axis], size * stride, *rest))
            x = joined[(slice(None),) * axis + (slice(size * stride - stride + 1),)]
    return x
