"""Convolutions, pools and resizing. TensorFlow's CPU kernels need channels last."""

from __future__ import annotations

import functools
import math

import keras
import numpy as np
from keras import ops

from onward.engines.framework import Operators
from onward.engines.keras.movement import pad
from onward.engines.keras.types import available, dtype_of, is_float
from onward.engines.shared.spatial import resized_axes
from onward.engines.shared.windows import counts, cut_off, paddings, reach, with_ceiling

operators = Operators()


def on_windows(function, x, amounts, fill=0):
    """Apply a function of a tensor and its layout to a padded tensor."""
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
    if max(strides) > 1 and max(dilations) > 1:  # TensorFlow does not take both
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
    x, w, bias=None, *, auto_pad="NOTSET", dilations=None, group=1, output_padding=None, output_shape=None,
    pads=None, strides=None,
):  # fmt: skip
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
    """Insert zeros between the elements of the last axes."""
    for axis, stride in enumerate(strides, 2):
        if stride > 1:
            size, rest = x.shape[axis], x.shape[axis + 1 :]
            apart = ops.pad(
                ops.expand_dims(x, axis + 1), [(0, (stride - 1) * (i == axis + 1)) for i in range(len(x.shape) + 1)]
            )
            joined = ops.reshape(apart, (-1, *x.shape[1:axis], size * stride, *rest))
            x = joined[(slice(None),) * axis + (slice(size * stride - stride + 1),)]
    return x


# ---- pooling ---------------------------------------------------------------------------------------------------------


def place_windows(x, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides):
    """Return strides, dilations, the padding of the node, and the padding with `ceil_mode`."""
    count = len(x.shape) - 2
    strides, dilations = strides or [1] * count, dilations or [1] * count
    asked = paddings(auto_pad, pads, x.shape[2:], kernel_shape, strides, dilations)
    added = with_ceiling(asked, x.shape[2:], kernel_shape, strides, dilations) if ceil_mode else asked
    return strides, dilations, asked, added


def over_windows(combine, tensors, fills, kernel, strides, dilations, added):
    """Combine the elements of windows, one axis after the other. All tensors have the same windows."""
    amounts = [(0, 0), (0, 0), *added]
    tensors = [ops.pad(x, amounts, constant_values=fill) for x, fill in zip(tensors, fills, strict=True)]
    for axis in reversed(range(2, len(amounts))):
        length, stride, dilation = kernel[axis - 2], strides[axis - 2], dilations[axis - 2]
        last = (tensors[0].shape[axis] - reach(length, dilation)) // stride * stride
        before = (slice(None),) * axis
        starts = range(0, length * dilation, dilation)
        tensors = functools.reduce(
            combine, ([x[(*before, slice(i, i + last + 1, stride))] for x in tensors] for i in starts)
        )
    return tensors


def larger(first, second):
    """Return the larger elements, and the tensors that belong to them. The first wins a tie."""
    better = second[0] > first[0]
    return [ops.where(better, b, a) for a, b in zip(first, second, strict=True)]


def add_up(first, second):
    return [first[0] + second[0]]


@operators.define("MaxPool")
def max_pool(
    x, *, auto_pad="NOTSET", ceil_mode=0, dilations=None, kernel_shape, pads=None, storage_order=0, strides=None,
    outputs=1,
):  # fmt: skip
    strides, dilations, _, added = place_windows(x, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    lowest = -np.inf if is_float(x) else np.iinfo(dtype_of(x)).min
    if outputs == 1 and is_float(x) and set(dilations) == {1}:

        def pooled(x, layout):
            return ops.max_pool(x, tuple(kernel_shape), tuple(strides), "valid", layout)

        return on_windows(pooled, x, added, lowest)
    if outputs == 1:
        return over_windows(larger, [x], [lowest], kernel_shape, strides, dilations, added)[0]
    order = range(len(x.shape)) if storage_order == 0 else (0, 1, *reversed(range(2, len(x.shape))))
    indices = np.arange(math.prod(x.shape)).reshape([x.shape[i] for i in order]).transpose(np.argsort(order))
    tensors = [x, ops.convert_to_tensor(indices, available("int64"))]
    return tuple(over_windows(larger, tensors, [lowest, 0], kernel_shape, strides, dilations, added))


@operators.define("AveragePool")
def average_pool(
    x, *, auto_pad="NOTSET", ceil_mode=0, count_include_pad=0, dilations=None, kernel_shape, pads=None,
    strides=None,
):  # fmt: skip
    strides, dilations, asked, added = place_windows(x, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    counted = asked if count_include_pad else [(0, 0)] * len(asked)
    per_axis = map(counts, x.shape[2:], added, counted, kernel_shape, strides, dilations)
    number, size = functools.reduce(np.multiply.outer, per_axis), math.prod(kernel_shape)
    if set(dilations) == {1}:

        def pooled(x, layout):
            return ops.average_pool(x, tuple(kernel_shape), tuple(strides), "valid", layout)

        mean = on_windows(pooled, x, added)
        return mean if (number == size).all() else mean * ops.convert_to_tensor(size / number, dtype_of(x))
    total = over_windows(add_up, [x], [0], kernel_shape, strides, dilations, added)[0]
    return total / ops.convert_to_tensor(number, dtype_of(x))


@operators.define("LpPool")
def lp_pool(x, *, auto_pad="NOTSET", ceil_mode=0, dilations=None, kernel_shape, p=2, pads=None, strides=None):
    strides, dilations, _, added = place_windows(x, auto_pad, ceil_mode, dilations, kernel_shape, pads, strides)
    powers = ops.power(ops.abs(x), p)
    return ops.power(over_windows(add_up, [powers], [0], kernel_shape, strides, dilations, added)[0], 1 / p)


def space(x):
    return tuple(range(2, len(x.shape)))


@operators.define("GlobalMaxPool")
def global_max_pool(x):
    return ops.max(x, space(x), keepdims=True)


@operators.define("GlobalAveragePool")
def global_average_pool(x):
    return ops.mean(x, space(x), keepdims=True)


@operators.define("GlobalLpPool")
def global_lp_pool(x, *, p=2):
    return ops.power(ops.sum(ops.power(ops.abs(x), p), space(x), keepdims=True), 1 / p)


# ---- grids -----------------------------------------------------------------------------------------------------------


@operators.define("Resize")
def resize(
    x, roi=None, scales=None, sizes=None, *, antialias=0, axes=None, coordinate_transformation_mode="half_pixel",
    cubic_coeff_a=-0.75, exclude_outside=0, extrapolation_value=0.0, keep_aspect_ratio_policy="stretch",
    mode="nearest", nearest_mode="round_prefer_floor",
):  # fmt: skip
    """Resize x. Unknown sizes stay."""
    changes = resized_axes(
        [size or 1 for size in x.shape],
        *(None if x is None else np.asarray(x) for x in (roi, scales, sizes)),
        antialias=antialias,
        axes=axes,
        coordinate_transformation_mode=coordinate_transformation_mode,
        cubic_coeff_a=cubic_coeff_a,
        exclude_outside=exclude_outside,
        keep_aspect_ratio_policy=keep_aspect_ratio_policy,
        mode=mode,
        nearest_mode=nearest_mode,
    )
    for axis, matrix, outside, picks in changes:
        if picks:
            x = ops.take(x, matrix.argmax(1).astype(np.int32), axis)
        else:
            x = ops.moveaxis(
                ops.matmul(ops.moveaxis(x, axis, -1), ops.convert_to_tensor(matrix.T, dtype_of(x))), -1, axis
            )
        if outside.any():
            along = outside.reshape([-1 if i == axis else 1 for i in range(len(x.shape))])
            x = ops.where(along, ops.cast(extrapolation_value, dtype_of(x)), x)
    return x
