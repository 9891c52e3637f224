"""Convolution, pooling, padding, cropping and upsampling layers in one, two or three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onward.build import Expr
from onward.engines.shared.windows import paddings, reach
from onward.frameworks.formulas.graph_building import END, as_pads
from onward.frameworks.keras.layers import Call, LayerTensor, row
from onward.frameworks.keras.layers.activations import activate


def _channels_last(c: Call) -> bool:
    return getattr(c.layer, "data_format", "channels_last") == "channels_last"


def _entry(c: Call, x: LayerTensor) -> Expr:
    """Return the input with the channels second."""
    return x.moved if _channels_last(c) else x.plain


def _result(c: Call, y: Expr) -> LayerTensor:
    return LayerTensor(c.shape, moved=y) if _channels_last(c) else LayerTensor(c.shape, plain=y)


def _padding(c: Call, x: LayerTensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Any:
    """Return attributes. `same` pads more at the end if odd; `causal` at the beginning."""
    if c.layer.padding == "valid":
        return {}
    if c.layer.padding == "causal":
        return {"pads": [reach(kernel[0], dilations[0]) - 1, 0]}
    extent = list(x.shape[1:-1] if _channels_last(c) else x.shape[2:])
    if any(size is None and stride > 1 for size, stride in zip(extent, strides, strict=True)):
        return {"auto_pad": "SAME_UPPER"}
    return {"pads": as_pads(paddings("SAME_UPPER", None, [size or 1 for size in extent], kernel, strides, dilations))}


def _add_bias(c: Call, y: Expr) -> LayerTensor:
    """Add the bias of the layer, and apply its activation."""
    if c.layer.use_bias:
        y = y + c.op.Reshape(c.weight(c.layer.bias), [-1, *[1] * (len(c.shape) - 2)])
    return activate(c, c.layer.activation, _result(c, y))


def _outermost(kernel: Expr, rank: int, *, swap: bool = False) -> Expr:
    """Transpose a kernel (*window, a, b) to (b, a, *window), or to (a, b, *window)."""
    front = [rank - 2, rank - 1] if swap else [rank - 1, rank - 2]
    return kernel.op.Transpose(kernel, perm=[*front, *range(rank - 2)])


@row("Conv1D", "Conv2D", "Conv3D")
def convolution(c: Call, x: LayerTensor) -> LayerTensor:
    layer = c.layer
    c.refuse_unless(not getattr(layer, "lora_enabled", False), "has adapters")
    kernel = _outermost(c.weight(layer.kernel), x.rank)
    return _add_bias(c, _convolve(c, x, kernel, layer.kernel_size, layer.groups))


def _convolve(c: Call, x: LayerTensor, kernel: Expr, window: Sequence[int], groups: int) -> Expr:
    strides, dilations = list(c.layer.strides), list(c.layer.dilation_rate)
    padding = _padding(c, x, window, strides, dilations)
    sizes = {"kernel_shape": list(window), "strides": strides, "dilations": dilations}
    return c.op.Conv(_entry(c, x), kernel, group=int(groups), **sizes, **padding)


@row("DepthwiseConv1D", "DepthwiseConv2D")
def depthwise(c: Call, x: LayerTensor) -> LayerTensor:
    return _add_bias(c, _each_channel(c, x, c.layer.kernel))


@row("SeparableConv1D", "SeparableConv2D")
def separable(c: Call, x: LayerTensor) -> LayerTensor:
    depthwise_result = _each_channel(c, x, c.layer.depthwise_kernel)
    return _add_bias(c, c.op.Conv(depthwise_result, _outermost(c.weight(c.layer.pointwise_kernel), x.rank)))


def _each_channel(c: Call, x: LayerTensor, kernel: Any) -> Expr:
    """Convolve each channel with its own kernels."""
    *window, channels, _ = (int(size) for size in kernel.shape)
    grouped = c.op.Reshape(_outermost(c.weight(kernel), x.rank, swap=True), [-1, 1, *window])
    return _convolve(c, x, grouped, window, channels)


@row("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
def convolution_transpose(c: Call, x: LayerTensor) -> LayerTensor:
    layer = c.layer
    plain = layer.output_padding is None and all(d == 1 for d in layer.dilation_rate)
    c.refuse_unless(plain, "has an output padding or a dilation")
    window, strides = list(layer.kernel_size), list(layer.strides)
    beyond = [k - s for k, s in zip(window, strides, strict=True)]
    pads = [max(n, 0) if layer.padding == "same" else 0 for n in beyond]
    y = c.op.ConvTranspose(
        _entry(c, x),
        _outermost(c.weight(layer.kernel), x.rank),
        kernel_shape=window,
        strides=strides,
        pads=[*(n // 2 for n in pads), *(n - n // 2 for n in pads)],
        output_padding=[max(-n, 0) for n in beyond],
    )
    return _add_bias(c, y)


@row("MaxPooling1D", "MaxPooling2D", "MaxPooling3D", "AveragePooling1D", "AveragePooling2D", "AveragePooling3D")
def pooling(c: Call, x: LayerTensor) -> LayerTensor:
    window, strides = _sizes(c.layer.pool_size, x), _sizes(c.layer.strides, x)
    operator = c.op.MaxPool if type(c.layer).__name__.startswith("Max") else c.op.AveragePool
    padding = _padding(c, x, window, strides, [1] * len(window))
    return _result(c, operator(_entry(c, x), kernel_shape=window, strides=strides, **padding))


def _sizes(sizes: Any, x: LayerTensor) -> list[int]:
    return [int(sizes)] * (x.rank - 2) if isinstance(sizes, int) else [int(size) for size in sizes]


@row(*(f"Global{name}Pooling{n}D" for name in ("Average", "Max") for n in (1, 2, 3)))
def global_pooling(c: Call, x: LayerTensor) -> LayerTensor:
    reduce = c.op.ReduceMean if "Average" in type(c.layer).__name__ else c.op.ReduceMax
    keep = int(c.layer.keepdims)
    if _channels_last(c) and not x.is_moved:
        return LayerTensor(c.shape, plain=reduce(x.plain, list(range(1, x.rank - 1)), keepdims=keep))
    return _result(c, reduce(_entry(c, x), list(range(2, x.rank)), keepdims=keep))


@row("ZeroPadding1D", "ZeroPadding2D", "ZeroPadding3D")
def zero_padding(c: Call, x: LayerTensor) -> LayerTensor:
    return _result(c, c.op.Pad(_entry(c, x), as_pads([(0, 0), (0, 0), *_margins(c.layer.padding)])))


@row("Cropping1D", "Cropping2D", "Cropping3D")
def cropping(c: Call, x: LayerTensor) -> LayerTensor:
    begins, ends = zip(*((before, -after or END) for before, after in _margins(c.layer.cropping)), strict=True)
    return _result(c, c.op.Slice(_entry(c, x), begins, ends, list(range(2, x.rank))))


def _margins(margins: Any) -> list[list[int]]:
    return [list(map(int, pair)) for pair in ([margins] if isinstance(margins[0], int) else margins)]


@row("UpSampling1D", "UpSampling2D", "UpSampling3D")
def upsampling(c: Call, x: LayerTensor) -> LayerTensor:
    layer = c.layer
    method = getattr(layer, "interpolation", "nearest")
    c.refuse_unless(method in ("nearest", "bilinear"), f"interpolates by `{method}`")
    linear = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
    nearest = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    scales = c.constant(np.asarray([1, 1, *_sizes(layer.size, x)], np.float32))
    return _result(c, c.op.Resize(_entry(c, x), None, scales, **(nearest if method == "nearest" else linear)))
