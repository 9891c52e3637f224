"""Convolutions, pools and resizing.

TensorFlow's CPU kernels need channels last, so tensors are transposed before and after. Inputs are
padded explicitly. Its derivatives of dilated and grouped convolutions are incomplete on the CPU:
with strides, a dilated kernel is filled with zeros, and each group is a separate convolution.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import tensorflow as tf

from onward.engines.framework import NotOnHost, Operators
from onward.engines.shared.spatial import (
    ATTRIBUTES,
    Windows,
    as_resize,
    count_elements,
    find_largest,
    place_windows,
    root,
    sum_windows,
)
from onward.engines.shared.windows import cut_off, halves, paddings, reach
from onward.engines.tensorflow.types import elements, shape_of, size_of, sizes, vector

operators = Operators()


@operators.define("Conv")
def conv(x, w, b=None, *, auto_pad, dilations, group, pads, strides):
    rank = x.shape.rank - 2
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    x = tf.ensure_shape(x, [None, w.shape[1] * group, *[None] * rank])  # TensorFlow's kernels ask for channels
    widths = _widths(x, auto_pad, pads, w.shape[2:], strides, dilations)
    y = _convolve(_pad(channels_last(x), widths), _kernel_last(w), group, strides, dilations)
    return channels_first(y if b is None else y + b)


def _widths(x, auto_pad, pads, kernel, strides, dilations):
    """Return the padding of each axis, as tensors for SAME with unknown sizes."""
    if x.shape[2:].is_fully_defined() or not auto_pad.startswith("SAME"):
        return paddings(auto_pad, pads, x.shape[2:], kernel, strides, dilations)
    windows = zip(shape_of(x)[2:], map(reach, kernel, dilations), strides, strict=True)
    totals = [tf.maximum(((n + s - 1) // s - 1) * s + covered - n, 0) for n, covered, s in windows]
    return [halves(total, larger_last=auto_pad == "SAME_UPPER") for total in totals]


def per_channel(b, rank):
    """Reshape one number per channel to broadcast with an image of `rank` spatial axes."""
    return tf.reshape(b, [-1, *[1] * rank])


def channels_last(x):
    return tf.transpose(x, [0, *range(2, x.shape.rank), 1])


def channels_first(x):
    return tf.transpose(x, [0, x.shape.rank - 1, *range(1, x.shape.rank - 1)])


def _kernel_last(w):
    """Transpose [out, in, ...] to [..., in, out]."""
    return tf.transpose(w, [*range(2, w.shape.rank), 1, 0])


def _pad(x, widths):
    return tf.pad(x, [(0, 0), *widths, (0, 0)]) if _pads(widths) else x


def _pads(widths):
    """True if there is padding, or it depends on sizes."""
    return any(not isinstance(width, int) or width for pair in widths for width in pair)


_LAYOUTS = {4: "NHWC", 5: "NDHWC"}
"""Rank of an image -> its layout, which derivatives need."""


def _convolve(x, w, group, strides, dilations):
    rank = len(strides)
    if rank == 1:
        x, w, strides, dilations = x[:, None], w[None], [1, *strides], [1, *dilations]
    if max(dilations) > 1 and (max(strides) > 1 or group > 1 or rank == 3):
        w, dilations = _with_gaps(w, dilations), [1] * len(dilations)
    channels = x.shape[-1]
    if group == 1:
        y = tf.nn.convolution(x, w, strides, "VALID", _LAYOUTS[x.shape.rank], dilations)
    elif group == channels and len(strides) == 2 and strides[0] == strides[1]:
        depthwise = tf.reshape(w, [*w.shape[:-2], channels, -1])  # from [..., 1, channels * multiplier]
        y = tf.nn.depthwise_conv2d(x, depthwise, [1, *strides, 1], "VALID")
    else:
        groups = zip(tf.split(x, group, -1), tf.split(w, group, -1), strict=True)
        y = tf.concat(
            [tf.nn.convolution(image, kernel, strides, "VALID", _LAYOUTS[x.shape.rank]) for image, kernel in groups], -1
        )
    return y[:, 0] if rank == 1 else y


def _with_gaps(w, dilations):
    """Insert zeros between the elements of a kernel."""
    for axis, dilation in enumerate(dilations):
        if dilation > 1:
            size = w.shape[axis]
            apart = tf.pad(
                tf.expand_dims(w, axis + 1), [(0, (dilation - 1) * (i == axis + 1)) for i in range(w.shape.rank + 1)]
            )
            joined = tf.reshape(apart, [*w.shape[:axis], size * dilation, *w.shape[axis + 1 :]])
            w = tf.gather(joined, np.arange((size - 1) * dilation + 1), axis=axis)
    return w


@operators.define("ConvTranspose")
def conv_transpose(x, w, b=None, *, auto_pad, dilations, group, output_padding, output_shape, pads, strides):
    rank = x.shape.rank - 2
    strides, dilations, more = strides or [1] * rank, dilations or [1] * rank, output_padding or [0] * rank
    reaches = map(reach, w.shape[2:], dilations)
    full = [(n - 1) * s + covered for n, s, covered in zip(shape_of(x)[2:], strides, reaches, strict=True)]
    known_sizes = sizes(x, 2) if output_shape or auto_pad.startswith("SAME") else x.shape[2:]
    cut = cut_off(auto_pad, pads, known_sizes, w.shape[2:], strides, dilations, more, output_shape)
    y = _convolve_transposed(channels_last(x), _with_gaps(_kernel_last(w), dilations), group, strides, full)
    ends = [(-low, m - high) for (low, high), m in zip(cut, more, strict=True)]  # negative: crop, positive: pad
    y = _pad(y, [(max(low, 0), max(high, 0)) for low, high in ends])
    inside = [slice(max(-low, 0), min(high, 0) or None) for low, high in ends]
    y = y[(slice(None), *inside)]
    return channels_first(y if b is None else y + b)


def _convolve_transposed(x, w, group, strides, sizes):
    """Return the transposed convolution without cropping. The kernel is [..., out, in]."""
    rank, strides = len(strides), list(strides)
    if rank == 1:
        x, w, strides, sizes = x[:, None], w[None], [1, *strides], [1, *sizes]
    results = [
        tf.nn.conv_transpose(
            image, kernel, tf.cast(vector([size_of(x, 0), *sizes, kernel.shape[-2]]), tf.int32), strides, "VALID"
        )
        for image, kernel in zip(tf.split(x, group, -1), tf.split(w, group, -1), strict=True)
    ]
    y = tf.concat(results, -1)
    return y[:, 0] if rank == 1 else y


# ---- pools: TensorFlow's kernels need channels last ------------------------------------------------------------------


def _native(pool, x, windows, filling):
    """Apply a pooling function of TensorFlow to a padded image."""
    widths = [(0, 0), (0, 0), *windows.added]
    filled = tf.pad(x, widths, constant_values=tf.cast(filling, x.dtype)) if _pads(widths) else x
    last, kernel, strides = channels_last(filled), windows.kernel, windows.strides
    if len(kernel) == 1:
        return channels_first(pool(last[:, None], [1, *kernel], [1, *strides], "VALID")[:, 0])
    return channels_first(pool(last, kernel, strides, "VALID"))


def _has_kernel(x, windows):
    types = (tf.float32,) if len(windows.kernel) == 3 else (tf.float16, tf.bfloat16, tf.float32, tf.float64)
    return x.dtype in types and len(windows.kernel) <= 3 and max(windows.dilations) == 1


def _place(x, kernel, auto_pad, ceil_mode, dilations, pads, strides):
    if x.shape[2:].is_fully_defined():
        return place_windows(x, kernel, auto_pad, ceil_mode, dilations, pads, strides)
    slide = kernel, strides or [1] * len(kernel), dilations or [1] * len(kernel)
    asked = added = _widths(x, auto_pad, pads, *slide)
    if ceil_mode:
        added = []
        windows = zip(asked, shape_of(x)[2:], slide[1], map(reach, kernel, slide[2]), strict=True)
        for (before, after), n, s, covered in windows:
            count = (before + n + after - covered + s - 1) // s + 1
            count -= tf.cast((count - 1) * s >= before + n, tf.int64)  # it would start in the padding
            added.append((before, tf.maximum((count - 1) * s + covered - before - n, after)))
    return Windows(*slide, asked, added)


@operators.define("MaxPool")
def max_pool(x, *, auto_pad, ceil_mode, dilations, kernel_shape, pads, storage_order, strides, outputs):
    windows = _place(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    if outputs == 1 and _has_kernel(x, windows):
        return _native(tf.nn.max_pool3d if len(kernel_shape) == 3 else tf.nn.max_pool2d, x, windows, -math.inf)
    sample = math.prod(sizes(x, 3 - outputs))  # raises if they are unknown
    largest = find_largest(x, windows, -math.inf if x.dtype.is_floating else x.dtype.min, storage_order, outputs)
    if outputs == 1 or x.shape[0] is not None:
        return largest
    first = tf.range(size_of(x, 0), dtype=tf.int64) * sample
    return largest[0], largest[1] + tf.reshape(first, [-1, *[1] * (x.shape.rank - 1)])


@operators.define("AveragePool")
def average_pool(x, *, auto_pad, ceil_mode, count_include_pad, dilations, kernel_shape, pads, strides):
    windows = _place(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    mean = tf.nn.avg_pool3d if len(kernel_shape) == 3 else tf.nn.avg_pool2d
    if _has_kernel(x, windows) and not x.shape[2:].is_fully_defined():
        if ceil_mode or auto_pad.startswith("SAME"):
            raise NotOnHost
        means, has_padding = _native(mean, x, windows, 0), np.any(windows.asked) and not count_include_pad
        return means / _native(mean, tf.ones_like(x), windows, 0) if has_padding else means
    sizes(x, 2)
    numbers, all_of_them = count_elements(x, windows, count_include_pad), math.prod(kernel_shape)
    if not _has_kernel(x, windows):
        return sum_windows(x, windows) / tf.constant(numbers, x.dtype)
    means = _native(mean, x, windows, 0)
    return means if (numbers == all_of_them).all() else means * tf.constant(all_of_them / numbers, x.dtype)


def _globally(reduce):
    """Return the global pool of a function [N, C, elements] -> [N, C]."""

    def pooled(x, **attributes):
        channels = shape_of(x)[:2]
        planes = tf.reshape(x, vector([*channels, -1]))
        return tf.reshape(reduce(planes, **attributes), vector([*channels, *[1] * (x.shape.rank - 2)]))

    return pooled


def _largest(x):
    """Return the maximum along the last axis. The first of equal elements has the full gradient."""
    return tf.gather(x, tf.argmax(x, -1), batch_dims=x.shape.rank - 1)


operators(
    GlobalMaxPool=_globally(_largest),
    GlobalAveragePool=_globally(lambda x: tf.reduce_mean(x, -1)),
    GlobalLpPool=lambda x, *, p: _globally(lambda y: root(tf.reduce_sum(tf.abs(y) ** p, -1), p))(x),
)


# ---- grids -----------------------------------------------------------------------------------------------------------


def _resize_open(x, roi, scales, wanted, *, mode, axes=None, **named):
    """Resize axes of unknown size, by the nearest element or by two or four neighbors."""
    is_plain = not named["antialias"] and not named["exclude_outside"] and (roi is None or roi.shape == (0,))
    if not is_plain or named["keep_aspect_ratio_policy"] != "stretch" or not x.dtype.is_floating:
        raise NotOnHost
    by_sizes = wanted is not None and wanted.shape != (0,)
    chosen = range(x.shape.rank) if axes is None else [axis % x.shape.rank for axis in axes]
    for axis, number in zip(chosen, elements(wanted if by_sizes else scales), strict=True):
        if isinstance(number, int | float) and number == (x.shape[axis] if by_sizes else 1):
            continue
        before, number = (tf.cast(size, tf.float64) for size in (size_of(x, axis), number))
        after, factor = (number, number / before) if by_sizes else (tf.floor(before * number), number)
        places = tf.range(after, dtype=tf.float64)
        match named["coordinate_transformation_mode"]:
            case "half_pixel":
                places = (places + 0.5) / factor - 0.5
            case "pytorch_half_pixel":
                places = tf.where(after > 1, (places + 0.5) / factor - 0.5, 0)
            case "align_corners":
                places = places * (before - 1) / tf.maximum(factor * before - 1, 1)
            case "asymmetric":
                places = places / factor
            case _:
                raise NotOnHost
        rounding = named["nearest_mode"] if mode == "nearest" else None
        x = _pick(x, axis, places, before, rounding, named["cubic_coeff_a"] if mode == "cubic" else None)
    return x


_ROUNDINGS = {
    "round_prefer_floor": lambda x: tf.math.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: tf.floor(x + 0.5),
    "floor": tf.floor,
    "ceil": tf.math.ceil,
}


def _pick(x, axis, places, size, rounding, cubic):
    """Return the elements at places along an axis, rounded or between two or four neighbors."""

    def at(places):
        return tf.gather(x, tf.cast(tf.clip_by_value(places, 0, size - 1), tf.int64), axis=axis)

    if rounding is not None:
        return at(_ROUNDINGS[rounding](places))
    first = tf.floor(places)
    part = tf.reshape(tf.cast(places - first, x.dtype), [-1 if i == axis else 1 for i in range(x.shape.rank)])
    if cubic is None:
        return at(first) * (1 - part) + at(first + 1) * part
    return sum(at(first + step) * _cubic_weight(abs(part - step), cubic) for step in (-1, 0, 1, 2))


def _cubic_weight(distance, a):
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return tf.where(distance <= 1, near, far)


@operators.define("Resize")
def resize(x, roi=None, scales=None, wanted=None, **named):
    is_known = all(value is None or isinstance(value, np.ndarray) for value in (scales, wanted))
    if is_known and x.shape.is_fully_defined():
        return _resize_known(x, roi, scales, wanted, **named)
    return _resize_open(x, roi, scales, wanted, **named)


resize.asks_for = ATTRIBUTES  # type: ignore[attr-defined]


@functools.partial(as_resize, shape_of=sizes)
def _resize_known(x, along, extrapolation_value, mode):
    rank, y = x.shape.rank, x if mode == "nearest" or x.dtype.is_floating else tf.cast(x, tf.float32)
    outside = np.zeros([1] * rank, bool)
    for change in along:
        y = (
            tf.gather(y, change.matrix.argmax(1), axis=change.axis)
            if change.picks
            else _times(y, change.matrix, change.axis)
        )
        outside = outside | change.outside.reshape([-1 if axis == change.axis else 1 for axis in range(rank)])
    y = y if y.dtype == x.dtype else tf.cast(tf.round(y), x.dtype)
    return tf.where(outside, tf.cast(extrapolation_value, y.dtype), y) if outside.any() else y


def _times(x, matrix, axis):
    """Multiply each line along an axis with a matrix."""
    rank = x.shape.rank
    product = tf.tensordot(x, tf.constant(matrix, x.dtype), [[axis], [1]])
    return tf.transpose(product, [*range(axis), rank - 1, *range(axis, rank - 1)])
