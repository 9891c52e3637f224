"""Fused convolutions in ONNX Runtime's layouts, crops, and GridSample."""

import numpy as np

from onward.rules.common import rank, standard_attributes
from onward.rules.microsoft.activation import apply_activation
from onward.rules.microsoft.domain import as_length, count_up_to, refuse, rewrite

_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


@rewrite("FusedConv")
def fused_conv(op, x, weights, bias, residual, *, activation=None, activation_params=(), node):
    y = op.Conv(x, weights, bias, **standard_attributes(node, *_CONV))
    y = y if residual is None else y + residual
    return apply_activation(op, y, activation, *activation_params)


@rewrite("NhwcFusedConv")
def nhwc_fused_conv(op, x, weights, bias, residual, *, activation=None, activation_params=(), node):
    """Return a FusedConv of images with channels last."""
    axes = _axes(node, weights)
    x, residual = (None if value is None else channels_first(op, value, axes) for value in (x, residual))
    settings = {"activation": activation, "activation_params": activation_params, "node": node}
    return channels_last(op, fused_conv(op, x, weights, bias, residual, **settings), axes)


@rewrite("NhwcConv")
def nhwc_conv(op, x, weights, bias, *, node):
    """Return a Conv of images and weights with channels last."""
    axes = _axes(node, weights)
    x, weights = channels_first(op, x, axes), channels_first(op, weights, axes)
    return channels_last(op, op.Conv(x, weights, bias, **standard_attributes(node, *_CONV)), axes)


@rewrite("NhwcMaxPool")
def nhwc_max_pool(op, x, *, kernel_shape, node):
    axes = len(kernel_shape) + 2
    settings = standard_attributes(node, "auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")
    return channels_last(op, op.MaxPool(channels_first(op, x, axes), **settings), axes)


@rewrite("ConvTransposeWithDynamicPads")
def conv_transpose_with_dynamic_pads(op, x, weights, pads, bias, *, node):
    """Crop the padding off a ConvTranspose."""
    settings = standard_attributes(node, "auto_pad", "dilations", "group", "kernel_shape", "output_padding", "strides")
    y = op.ConvTranspose(x, weights, bias, **settings)
    if pads is None:
        return y
    begin, end = op.Split(pads, outputs=2, axis=0, num_outputs=2)
    return op.Slice(y, begin, op.Shape(y, start=2) - end, list(range(2, _axes(node, weights))))


@rewrite("CropAndResize")
def crop_and_resize(op, x, boxes, images, size, *, mode="bilinear", extrapolation_value=0.0):
    """Return R X C': a row of R (C) has the weights of the image's rows (columns) in a row (column) of the crop."""
    images = op.Gather(x, images, axis=0)
    rows, columns = op.Split(as_length(op, size), outputs=2, axis=0, num_outputs=2)
    top, left, bottom, right = op.Split(boxes, outputs=4, axis=1, num_outputs=4)
    by_row, in_height = _sample_weights(op, top, bottom, rows, op.Shape(x, start=2, end=3), mode)
    by_column, in_width = _sample_weights(op, left, right, columns, op.Shape(x, start=3, end=4), mode)
    y = by_row @ images @ op.Transpose(by_column, perm=[0, 1, 3, 2])
    inside = op.And(op.Unsqueeze(in_height, [1, 3]), op.Unsqueeze(in_width, [1, 2]))
    return op.Where(inside, y, extrapolation_value)


def _sample_weights(op, first, last, count, length, mode):
    """Return the weights [box, 1, sample, pixel] of samples from `first` to `last`, and a mask of samples inside."""
    steps = op.CastLike(op.Max(count - 1, 1), first)
    fraction = op.Unsqueeze(op.CastLike(count_up_to(op, count), first) / steps, [0])
    fraction = op.Where(op.Equal(count, np.int64(1)), 0.5, fraction)
    end = op.CastLike(length - 1, first)
    position = (first * (1 - fraction) + last * fraction) * end
    pixels = op.CastLike(count_up_to(op, length), first)
    if mode == "nearest":
        weights = op.CastLike(op.Equal(op.Unsqueeze(op.Floor(position + 0.5), [2]), pixels), first)
    else:
        weights = op.Relu(1 - op.Abs(op.Unsqueeze(position, [2]) - pixels))
    return op.Unsqueeze(weights, [1]), op.And(position >= 0, position <= end)


@rewrite("GridSample")
def grid_sample(op, x, grid, *, mode="bilinear", padding_mode="zeros", align_corners=0):
    if op.opset >= 20:  # GridSample renamed its modes in this operator set
        mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    return op.GridSample(x, grid, mode=mode, padding_mode=padding_mode, align_corners=align_corners)


def _axes(node, weights):
    """Return the rank of the image, from `kernel_shape` or the weights."""
    kernel = node.attributes.get("kernel_shape")
    if kernel is not None:
        return len(kernel.value) + 2
    return rank(weights) or refuse(node, "weights of unknown rank")


def channels_first(op, x, axes):
    return op.Transpose(x, perm=[0, axes - 1, *range(1, axes - 1)])


def channels_last(op, x, axes):
    return op.Transpose(x, perm=[0, *range(2, axes), 1])
