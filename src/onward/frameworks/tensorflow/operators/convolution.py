"""Convolution, pooling, image resizing, batch normalization and matmul.

ONNX has channels first: tensors and kernels are transposed before and after.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.engines.framework import Operators
from onward.engines.shared.windows import paddings, reach
from onward.frameworks.formulas.graph_building import as_pads, permute
from onward.frameworks.tensorflow.graph import RefusedOperation, Statistics

operators = Operators()


def channels_first(op, x, layout):
    """Transpose [N, ..., C] to [N, C, ...]."""
    rank = len(layout)
    return permute(op, x, [0, rank - 1, *range(1, rank - 1)]) if layout.endswith("C") else x


def channels_last(op, x, layout):
    rank = len(layout)
    return permute(op, x, [0, *range(2, rank), 1]) if layout.endswith("C") else x


def _spatial(numbers, layout):
    return [number for number, axis in zip(numbers, layout, strict=True) if axis not in "NC"]


def _slide(node, layout, kernel=()):
    """Return the attributes of a window. The size of a dilated kernel must be known."""
    padding, steps = node.attribute("padding"), _spatial(node.attribute("strides"), layout)
    gaps = _spatial(node.attribute("dilations"), layout) if kernel else [1]
    slide = {"strides": steps, **({"dilations": gaps} if kernel else {})}
    if padding == "EXPLICIT":
        explicit = node.attribute("explicit_paddings")
        return {**slide, "pads": as_pads(_spatial(list(zip(explicit[::2], explicit[1::2], strict=True)), layout))}
    if padding == "SAME" and max(gaps) > 1:  # ONNX Runtime has no kernel for auto_pad with dilations
        sizes = [node.size(0, axis) if max(steps) > 1 else 1 for axis, name in enumerate(layout) if name not in "NC"]
        sides = [node.size(1, axis) for axis in kernel]
        return {**slide, "pads": as_pads(paddings("SAME_UPPER", None, sizes, sides, steps, gaps))}
    return {**slide, "auto_pad": "SAME_UPPER"} if padding == "SAME" else slide


@operators.define("Conv2D", "Conv3D")
def conv(op, x, w, *, node, data_format):
    rank = len(data_format)
    kernel = permute(op, w, [rank - 1, rank - 2, *range(rank - 2)])  # from [..., in, out]
    groups = node.size(0, data_format.index("C")) // node.size(1, -2)
    slide = _slide(node, data_format, range(rank - 2))
    return channels_last(op, op.Conv(channels_first(op, x, data_format), kernel, group=groups, **slide), data_format)


@operators.define("DepthwiseConv2dNative")
def depthwise(op, x, w, *, node, data_format):
    height, width, channels, multiplier = (node.size(1, axis) for axis in range(4))
    kernel = op.Reshape(permute(op, w, [2, 3, 0, 1]), [channels * multiplier, 1, height, width])
    y = op.Conv(channels_first(op, x, data_format), kernel, group=channels, **_slide(node, data_format, range(2)))
    return channels_last(op, y, data_format)


@operators.define("Conv2DBackpropInput")
def conv_transpose(op, shape, w, dy, *, node, strides, dilations, padding, data_format):
    """Compute `tf.nn.conv2d_transpose`."""
    if padding == "EXPLICIT":
        raise RefusedOperation("its padding is explicit")
    sizes = _spatial(node.operation.outputs[0].shape.as_list(), data_format)
    if None in sizes:
        raise RefusedOperation("the size of its result is unknown")
    steps, gaps = _spatial(strides, data_format), _spatial(dilations, data_format)
    kernel = [node.size(1, axis) for axis in range(len(gaps))]
    windows = paddings("SAME_UPPER" if padding == "SAME" else "VALID", None, sizes, kernel, steps, gaps)
    numbers = zip(sizes, windows, kernel, steps, gaps, strict=True)
    # Zeros at the end, which no window of the convolution reaches.
    more = [(n + sum(both) - reach(k, gap)) % step for n, both, k, step, gap in numbers]
    slide = {"strides": steps, "dilations": gaps, "pads": as_pads(windows), "output_padding": more}
    y = op.ConvTranspose(channels_first(op, dy, data_format), permute(op, w, [3, 2, 0, 1]), **slide)
    return channels_last(op, y, data_format)


def _pool(name):
    def pool(op, x, *, ksize, data_format, node):
        sizes, slide = _spatial(ksize, data_format), _slide(node, data_format)
        y = op.node("", name, channels_first(op, x, data_format), kernel_shape=sizes, **slide)
        return channels_last(op, y, data_format)

    return pool


operators(
    MaxPool=_pool("MaxPool"), MaxPool3D=_pool("MaxPool"), AvgPool=_pool("AveragePool"), AvgPool3D=_pool("AveragePool")
)


@operators.define("BiasAdd")
def bias_add(op, x, bias, *, data_format, node):
    if data_format == "NCHW" and node.rank(0) > 2:
        bias = op.Unsqueeze(bias, list(range(1, node.rank(0) - 1)))
    return x + bias


@operators.define("SpaceToBatchND")
def space_to_batch(op, x, _, __, *, node):
    """Move every n-th element of an axis to a batch, as `tf.nn.convolution` does to dilate."""
    blocks, rank = node.numbers(1), node.rank(0)
    count = len(blocks)
    widths = np.zeros((rank, 2), np.int64)
    widths[1 : 1 + count] = node.array(2)
    if widths.any():
        x = op.Pad(x, as_pads(widths.tolist()))
    rest = [node.size(0, axis) for axis in range(1 + count, rank)]
    together = [(node.size(0, i) + int(widths[i].sum())) // block for i, block in enumerate(blocks, 1)]
    apart = op.Reshape(x, [-1, *(n for pair in zip(together, blocks, strict=True) for n in pair), *rest])
    order = [*range(2, 2 + 2 * count, 2), 0, *range(1, 1 + 2 * count, 2), *range(1 + 2 * count, rank + count)]
    return op.Reshape(permute(op, apart, order), [-1, *together, *rest])


@operators.define("BatchToSpaceND")
def batch_to_space(op, x, _, __, *, node):
    blocks, rank, cut = node.numbers(1), node.rank(0), node.array(2)
    count = len(blocks)
    sizes = [node.size(0, axis + 1) for axis in range(count)]
    rest = [node.size(0, axis) for axis in range(1 + count, rank)]
    apart = op.Reshape(x, [*blocks, -1, *sizes, *rest])
    order = [count, *(axis for i in range(count) for axis in (count + 1 + i, i)), *range(2 * count + 1, rank + count)]
    whole = [size * block for size, block in zip(sizes, blocks, strict=True)]
    y = op.Reshape(permute(op, apart, order), [-1, *whole, *rest])
    if not cut.any():
        return y
    ends = [size - int(high) for size, high in zip(whole, cut[:, 1], strict=True)]
    return op.Slice(y, cut[:, 0].tolist(), ends, list(range(1, count + 1)))


def _resize(op, x, sizes, mode, align_corners, half_pixel_centers, **more):
    coordinates = "align_corners" if align_corners else "half_pixel" if half_pixel_centers else "asymmetric"
    images = channels_first(op, x, "NHWC")
    whole = op.Concat(op.Shape(images, start=0, end=2), np.array(sizes, np.int64), axis=0)
    y = op.Resize(images, None, None, whole, mode=mode, coordinate_transformation_mode=coordinates, **more)
    return channels_last(op, y, "NHWC")


@operators.define("ResizeBilinear")
def bilinear(op, x, _, *, align_corners, half_pixel_centers, node):
    return _resize(op, x, node.numbers(1), "linear", align_corners, half_pixel_centers)


@operators.define("ResizeNearestNeighbor")
def nearest(op, x, _, *, align_corners, half_pixel_centers, node):
    rounding = "round_prefer_ceil" if align_corners or half_pixel_centers else "floor"
    return _resize(op, x, node.numbers(1), "nearest", align_corners, half_pixel_centers, nearest_mode=rounding)


@operators.define("ImageProjectiveTransformV3")
def project(op, x, transforms, sizes, _, *, interpolation, fill_mode, node):
    """Sample images at projected positions: Keras rotates, shifts and zooms images with it."""
    padding = {"CONSTANT": "zeros", "REFLECT": "reflection", "NEAREST": "border"}.get(fill_mode)
    if padding is None or (padding == "zeros" and node.number(3) != 0):
        raise RefusedOperation("it fills with other values than 0")
    height, width = node.size(0, 1), node.size(0, 2)
    numbers = [op.Unsqueeze(op.Slice(transforms, [i], [i + 1], [1]), [2]) for i in range(8)]
    rows = [op.Cast(op.Slice(sizes, [i], [i + 1]), to=ir.DataType.INT64) for i in range(2)]
    y, x_axis = (
        op.Reshape(op.Cast(op.Range(np.int64(0), op.Squeeze(size, [0]), np.int64(1)), to=ir.DataType.FLOAT), shape)
        for size, shape in zip(rows, ([1, -1, 1], [1, 1, -1]), strict=True)
    )
    a0, a1, a2, b0, b1, b2, c0, c1 = numbers
    depth = c0 * x_axis + c1 * y + 1.0
    across, down = (a0 * x_axis + a1 * y + a2) / depth, (b0 * x_axis + b1 * y + b2) / depth
    normal = [(position * 2.0 + 1.0) / float(size) - 1.0 for position, size in ((across, width), (down, height))]
    count = op.Shape(x, start=0, end=1)
    grid = op.Concat(*(op.Unsqueeze(part, [3]) for part in normal), axis=3)
    grid = op.Expand(grid, op.Concat(count, np.array([1, 1, 1], np.int64), axis=0))
    mode = "linear" if interpolation == "BILINEAR" else "nearest"
    y = op.GridSample(channels_first(op, x, "NHWC"), grid, mode=mode, padding_mode=padding)
    return channels_last(op, y, "NHWC")


@operators.define("FusedBatchNormV3", "FusedBatchNormV2", "FusedBatchNorm")
def batch_norm(op, x, scale, bias, mean, variance, *, node, is_training, epsilon, data_format):
    """Normalize; in training also return the statistics of the batch (see running_averages.py).

    The node has the form of inference. An Identity before statistics marks those that training does
    not update.
    """
    images = channels_first(op, x, data_format)
    if not is_training:
        if any(value.value.producer() and node.known(i) is None for i, value in ((3, mean), (4, variance))):
            raise RefusedOperation("its statistics are computed, and TensorFlow does not differentiate them")
        y = op.BatchNormalization(images, scale, bias, op.Identity(mean), op.Identity(variance), epsilon=epsilon)
        return channels_last(op, y, data_format), mean, variance
    if node.operation.type == "FusedBatchNormV3" and node.attribute("exponential_avg_factor") != 1:
        raise RefusedOperation("it has an `exponential_avg_factor`, so it averages statistics itself")
    _, like_mean, like_variance, *_ = node.operation.outputs
    likes = like_mean, like_variance
    averages = [node.translator.placeholder(op, node, "it keeps no running averages", like) for like in likes]
    batch = [node.translator.placeholder(op, node, "more than averages read its statistics", like) for like in likes]
    y = op.BatchNormalization(images, scale, bias, *averages, epsilon=epsilon)
    node.translator.statistics.append(Statistics(y.value.producer(), (batch[0].value, batch[1].value), sample=True))
    return channels_last(op, y, data_format), *batch


def _transpose(op, x, rank):
    return permute(op, x, [*range(rank - 2), rank - 1, rank - 2])


@operators.define("MatMul")
def matmul(op, a, b, *, transpose_a, transpose_b):
    return (_transpose(op, a, 2) if transpose_a else a) @ (_transpose(op, b, 2) if transpose_b else b)


@operators.define("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batch_matmul(op, a, b, *, adj_x, adj_y, node):
    return (_transpose(op, a, node.rank(0)) if adj_x else a) @ (_transpose(op, b, node.rank(1)) if adj_y else b)


operators(Einsum=lambda op, *xs, equation: op.Einsum(*xs, equation=equation))
