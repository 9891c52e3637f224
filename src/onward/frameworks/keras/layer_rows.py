"""Layers of Keras that compute ONNX operators, for `layered.py`: one row for each operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import keras
import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from onward.frameworks.keras.layered import LayerBuilder

Layout = Literal["first", "last"]
Make = Callable[[], None]
"""Create a layer and put its result."""
Row = Callable[["LayerBuilder", ir.Node, dict[str, Any]], Make | None]
"""Return the function that creates the layer of a node, or None if no layer computes it."""
ROWS: dict[str, Row] = {}
SHARED = ("BatchNormalization", "Conv", "ConvTranspose", "Gather", "Gemm", "LayerNormalization")
"""Operators whose layer takes all weights from one node."""


def row(*operators: str) -> Callable[[Row], Row]:
    def register(function: Row) -> Row:
        ROWS.update(dict.fromkeys(operators, function))
        return function

    return register


def rank_of(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)


def dtype_of(value: ir.Value) -> str:
    return "float32" if value.dtype is None or not value.dtype.is_floating_point() else value.dtype.numpy().name


# ---- elements --------------------------------------------------------------------------------------------------------

_ACTIVATIONS = {
    "Relu": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh", "Softplus": "softplus", "Softsign": "softsign",
    "HardSwish": "hard_silu", "Mish": "mish", "Identity": "linear",
}  # fmt: skip


@row(*_ACTIVATIONS)
def _activation(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    return _elementwise(b, node, keras.layers.Activation, activation=_ACTIVATIONS[node.op_type])


@row("Gelu")
def _gelu(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    exact = named.get("approximate", "none") == "none"
    return _elementwise(b, node, keras.layers.Activation, activation="gelu") if exact else None


@row("LeakyRelu")
def _leaky_relu(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    return _elementwise(b, node, keras.layers.LeakyReLU, negative_slope=float(named["alpha"]))


@row("Elu")
def _elu(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    return _elementwise(b, node, keras.layers.ELU, alpha=float(named["alpha"]))


@row("HardSigmoid")
def _hard_sigmoid(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    is_same = math.isclose(named["alpha"], 1 / 6, rel_tol=1e-6) and named["beta"] == 0.5
    return _elementwise(b, node, keras.layers.Activation, activation="hard_sigmoid") if is_same else None


@row("Clip")
def _clip(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    low, high = (b.array(node.inputs[i]) if i < len(node.inputs) else None for i in (1, 2))
    if low is None or high is None or low.size != 1 or high.size != 1 or low.item() != 0 or not _is_float(node):
        return None
    return _elementwise(b, node, keras.layers.ReLU, max_value=float(high.item()))


@row("Dropout")
def _dropout(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    ratio = b.array(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else np.asarray(0.5)
    if ratio is None or len(node.inputs) > 2:
        return None
    return _elementwise(b, node, keras.layers.Dropout, rate=float(ratio.item()))


def _elementwise(b: LayerBuilder, node: ir.Node, kind: Any, x: ir.Value | None = None, **options: Any) -> Make | None:
    x = node.inputs[0] if x is None else x
    if x is None or not _is_float(node) or not b.is_tensor(x):
        return None

    def make() -> None:
        layout = b.layout_of([x])
        b.put(node.outputs[0], b.apply(kind, node, b.get(x, layout), **options), layout)

    return make


def _is_float(node: ir.Node) -> bool:
    return node.outputs[0].dtype is not None and node.outputs[0].dtype.is_floating_point()


_MERGES = {
    "Add": keras.layers.Add,
    "Mul": keras.layers.Multiply,
    "Sub": keras.layers.Subtract,
    "Max": keras.layers.Maximum,
    "Min": keras.layers.Minimum,
}


@row(*_MERGES)
def _merge(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    inputs = [value for value in node.inputs if value is not None]
    if len(inputs) == 2 and node.op_type in ("Add", "Mul"):
        for x, other in (inputs, inputs[::-1]):
            number = b.array(other)
            is_constant = number is not None and number.size == 1 and other.name not in b.parameters
            if is_constant and number is not None and number.ndim <= (rank_of(x) or 0) and b.is_tensor(x):
                scale, offset = (float(number.item()), 0.0) if node.op_type == "Mul" else (1.0, float(number.item()))
                return _elementwise(b, node, keras.layers.Rescaling, x, scale=scale, offset=offset)
    shapes = [value.shape for value in inputs]
    batches = {(len(shape), shape[0] if isinstance(shape[0], int) else None) for shape in shapes if shape}
    is_alike = None not in shapes and len(batches) == 1 and next(iter(batches))[0] > 1
    if len(inputs) < 2 or not is_alike or not _is_float(node) or not all(map(b.is_tensor, inputs)):
        return None

    def make() -> None:
        layout = b.layout_of(inputs)
        tensors = [b.get(value, layout) for value in inputs]
        b.put(node.outputs[0], b.apply(_MERGES[node.op_type], node, tensors), layout)

    return make


@row("PRelu")
def _prelu(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    x, slope = node.inputs[0], b.array(node.inputs[1])
    rank = rank_of(x)
    if x is None or rank is None or rank < 3 or slope is None or slope.ndim != rank - 1 or slope.size != slope.shape[0]:
        return None
    axes = [*range(1, rank - 1)]

    def make() -> None:
        alpha = np.moveaxis(slope, 0, -1)
        b.put(node.outputs[0], b.apply(keras.layers.PReLU, node, b.get(x, "last"), [alpha], shared_axes=axes), "last")

    return make if b.is_tensor(x) and slope.shape[0] == _channels(x) else None


@row("Softmax")
def _softmax(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    x, rank = node.inputs[0], rank_of(node.inputs[0])
    if x is None or rank is None or not b.is_tensor(x):
        return None
    axis = named["axis"] % rank

    def make() -> None:
        layout = b.layout_of([x])
        along = axis if layout == "first" else _last_axis(axis, rank)
        b.put(node.outputs[0], b.apply(keras.layers.Softmax, node, b.get(x, layout), axis=along), layout)

    return make


@row("Concat")
def _concat(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    inputs, rank = [value for value in node.inputs if value is not None], rank_of(node.outputs[0])
    if rank is None or len(inputs) < 2 or not all(map(b.is_tensor, inputs)) or not _is_float(node):
        return None
    axis = named["axis"] % rank
    if axis == 0:
        return None

    def make() -> None:
        layout = b.layout_of(inputs)
        along = axis if layout == "first" else _last_axis(axis, rank)
        tensors = [b.get(value, layout) for value in inputs]
        b.put(node.outputs[0], b.apply(keras.layers.Concatenate, node, tensors, axis=along), layout)

    return make


def _last_axis(axis: int, rank: int) -> int:
    """Return an axis in the layout with channels last."""
    return axis if axis == 0 else rank - 1 if axis == 1 else axis - 1


def _channels(value: ir.Value) -> int | None:
    size = value.shape[1] if value.shape is not None and len(value.shape) > 1 else None
    return size if isinstance(size, int) else None


# ---- positions -------------------------------------------------------------------------------------------------------


@row("Transpose")
def _transpose(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    x, rank = node.inputs[0], rank_of(node.inputs[0])
    if x is None or rank is None or not b.is_tensor(x):
        return None
    order = list(named.get("perm") or reversed(range(rank)))
    if order[0] != 0:
        return None

    def make() -> None:
        y = node.outputs[0]
        if rank > 2 and order == [0, *range(2, rank), 1]:
            b.put(y, b.get(x, "last"))
        elif rank > 2 and order == [0, rank - 1, *range(1, rank - 1)]:
            b.put(y, b.get(x), "last")
        else:
            b.put(y, b.apply(keras.layers.Permute, node, b.get(x), dims=order[1:]))

    return make


@row("Flatten", "Reshape", "Squeeze", "Unsqueeze")
def _reshape(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    """Read a change of shape that keeps the batch axis: as many elements in each sample."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or x.shape is None or y.shape is None or not len(x.shape) or not len(y.shape) or not b.is_tensor(x):
        return None
    sizes, target = list(x.shape[1:]), list(y.shape[1:])
    if not all(isinstance(size, int) and size for size in (*sizes, *target)) or math.prod(sizes) != math.prod(target):
        return None
    return lambda: b.put(y, b.apply(keras.layers.Reshape, node, b.get(x), target_shape=target))


@row("Gather")
def _embedding(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    table, indices = b.array(node.inputs[0]), node.inputs[1]
    if table is None or table.ndim != 2 or named["axis"] % 2 or not b.is_tensor(indices) or not _is_float(node):
        return None
    if not rank_of(indices):
        return None
    options = {"input_dim": table.shape[0], "output_dim": table.shape[1]}
    assert indices is not None
    return lambda: b.put(node.outputs[0], b.apply(keras.layers.Embedding, node, b.get(indices), [table], **options))


@row("Resize")
def _upsampling(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    x, scales = node.inputs[0], b.array(node.inputs[2]) if len(node.inputs) > 2 else None
    modes = named["mode"], named["coordinate_transformation_mode"], named["nearest_mode"]
    is_repeat = modes[0] == "nearest" and modes[1:] in (("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"))
    if x is None or rank_of(x) != 4 or scales is None or scales.size != 4 or not is_repeat or not b.is_tensor(x):
        return None
    if named.get("axes") or any(scale < 1 or scale != round(scale) for scale in scales) or any(scales[:2] != 1):
        return None
    size = int(scales[2]), int(scales[3])
    return lambda: b.put(node.outputs[0], b.apply(keras.layers.UpSampling2D, node, b.get(x, "last"), size=size), "last")


# ---- matmuls ---------------------------------------------------------------------------------------------------------


@row("MatMul", "Gemm", "onward.Linear")
def _dense(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    x, weight = node.inputs[0], b.array(node.inputs[1])
    bias = b.array(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else None
    is_gemm = node.op_type == "Gemm"
    if is_gemm and (named["transA"] or named["alpha"] != 1 or (named["beta"] != 1 and len(node.inputs) > 2)):
        return None
    if x is None or not b.is_tensor(x) or weight is None or weight.ndim != 2 or (rank_of(x) or 0) < 2:
        return None
    weight = weight.T if is_gemm and named["transB"] else weight
    if x.shape is None or x.shape[-1] != weight.shape[0]:  # Keras asks for it
        return None
    units, y = weight.shape[1], node.outputs[0]
    if len(node.inputs) > 2 and node.inputs[2] is not None and (bias is None or bias.ndim > 1 or bias.size != units):
        return None
    if bias is None and (merged := b.merge(node, "Add")) is not None:
        reader, other = merged
        bias = b.array(other)
        if bias is not None and bias.shape == (units,):
            b.skip(reader)
            y = reader.outputs[0]
        else:
            bias = None
    weights = [weight] if bias is None else [weight, bias.reshape(units)]
    return lambda: b.put(
        y, b.apply(keras.layers.Dense, node, b.get(x), weights, units=units, use_bias=bias is not None)
    )


# ---- images ----------------------------------------------------------------------------------------------------------

_CONVOLUTIONS = {1: keras.layers.Conv1D, 2: keras.layers.Conv2D, 3: keras.layers.Conv3D}
_DEPTHWISE = {1: keras.layers.DepthwiseConv1D, 2: keras.layers.DepthwiseConv2D}
_TRANSPOSED = {1: keras.layers.Conv1DTranspose, 2: keras.layers.Conv2DTranspose, 3: keras.layers.Conv3DTranspose}
_PADDINGS = {1: keras.layers.ZeroPadding1D, 2: keras.layers.ZeroPadding2D, 3: keras.layers.ZeroPadding3D}
_CROPS = {1: keras.layers.Cropping1D, 2: keras.layers.Cropping2D, 3: keras.layers.Cropping3D}
_MAXIMA = {1: keras.layers.MaxPooling1D, 2: keras.layers.MaxPooling2D, 3: keras.layers.MaxPooling3D}
_MEANS = {1: keras.layers.AveragePooling1D, 2: keras.layers.AveragePooling2D, 3: keras.layers.AveragePooling3D}
_GLOBAL = {
    "GlobalAveragePool": {
        1: keras.layers.GlobalAveragePooling1D,
        2: keras.layers.GlobalAveragePooling2D,
        3: keras.layers.GlobalAveragePooling3D,
    },
    "GlobalMaxPool": {
        1: keras.layers.GlobalMaxPooling1D,
        2: keras.layers.GlobalMaxPooling2D,
        3: keras.layers.GlobalMaxPooling3D,
    },
}


def _pads(named: dict[str, Any], rank: int) -> list[tuple[int, int]] | None:
    """Return the explicit padding of each axis."""
    if named["auto_pad"] not in ("NOTSET", "VALID"):
        return None
    pads = list(named.get("pads") or [0] * 2 * rank)
    return list(zip(pads[:rank], pads[rank:], strict=True))


def _padded(b: LayerBuilder, node: ir.Node, x: Any, pads: list[tuple[int, int]]) -> Any:
    """Return a tensor with zeros around it."""
    if not any(map(any, pads)):
        return x
    return b.apply(_PADDINGS[len(pads)], node, x, padding=pads[0] if len(pads) == 1 else tuple(pads))


def _stored_kernel(b: LayerBuilder, node: ir.Node) -> tuple[ir.Value, np.ndarray, np.ndarray | None] | None:
    """Return the image of a convolution, its kernel and its bias; None if they are not stored."""
    x, kernel = node.inputs[0], b.array(node.inputs[1])
    has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
    bias = b.array(node.inputs[2]) if has_bias else None
    if x is None or not b.is_tensor(x) or kernel is None or (has_bias and bias is None) or _channels(x) is None:
        return None
    return x, kernel, bias


@row("Conv")
def _convolution(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    stored = _stored_kernel(b, node)
    if stored is None:
        return None
    x, kernel, bias = stored
    rank, groups = kernel.ndim - 2, named["group"]
    strides, dilations = (list(named.get(key) or [1] * rank) for key in ("strides", "dilations"))
    pads, is_same = _pads(named, rank), named["auto_pad"] == "SAME_UPPER"
    if (pads is None and not is_same) or rank not in _CONVOLUTIONS or (max(strides) > 1 and max(dilations) > 1):
        return None
    reach = [(size - 1) * dilation for size, dilation in zip(kernel.shape[2:], dilations, strict=True)]
    if pads is not None and set(strides) == {1} and any(reach):
        is_same = all(pair == (size // 2, size - size // 2) for pair, size in zip(pads, reach, strict=True))
    is_depthwise = groups > 1 and kernel.shape[1] == 1 and groups == _channels(x)
    if groups > 1 and (not is_depthwise or rank not in _DEPTHWISE or len(set(strides)) > 1):
        return None  # TensorFlow has no derivative of grouped convolutions on the CPU
    common: dict[str, Any] = {"kernel_size": kernel.shape[2:], "strides": strides, "dilation_rate": dilations}
    common |= {"use_bias": bias is not None, "padding": "same" if is_same else "valid"}

    def make() -> None:
        tensor = b.get(x, "last")
        if not is_same and pads is not None:
            tensor = _padded(b, node, tensor, pads)
        weight: np.ndarray = np.moveaxis(kernel, (0, 1), (-1, -2))
        if is_depthwise:
            weight = kernel.reshape(groups, -1, *kernel.shape[2:])
            weight = np.moveaxis(weight, (0, 1), (-2, -1))
            options = {**common, "depth_multiplier": kernel.shape[0] // groups}
            result = b.apply(_DEPTHWISE[rank], node, tensor, [weight, *([] if bias is None else [bias])], **options)
        else:
            options = {**common, "filters": kernel.shape[0]}
            result = b.apply(_CONVOLUTIONS[rank], node, tensor, [weight, *([] if bias is None else [bias])], **options)
        b.put(node.outputs[0], result, "last")

    return make


@row("ConvTranspose")
def _transposed_convolution(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    stored = _stored_kernel(b, node)
    if stored is None:
        return None
    x, kernel, bias = stored
    rank = kernel.ndim - 2
    strides, pads = list(named.get("strides") or [1] * rank), _pads(named, rank)
    odd = named.get("output_shape") or any(named.get("output_padding") or []) or named["group"] > 1
    odd = odd or any(dilation > 1 for dilation in named.get("dilations") or [])
    if pads is None or odd or rank not in _TRANSPOSED:
        return None
    if any(size < stride for size, stride in zip(kernel.shape[2:], strides, strict=True)):
        return None  # Keras's result is longer then
    options: dict[str, Any] = {"filters": kernel.shape[1], "kernel_size": kernel.shape[2:], "strides": strides}

    def make() -> None:
        weights = [np.moveaxis(kernel, (0, 1), (-1, -2)), *([] if bias is None else [bias])]
        result = b.apply(_TRANSPOSED[rank], node, b.get(x, "last"), weights, use_bias=bias is not None, **options)
        if any(map(any, pads)):
            result = b.apply(_CROPS[rank], node, result, cropping=pads[0] if rank == 1 else tuple(pads))
        b.put(node.outputs[0], result, "last")

    return make


@row("BatchNormalization")
def _batch_normalization(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    x, weights = node.inputs[0], [b.array(value) for value in node.inputs[1:]]
    if x is None or not b.is_tensor(x) or named["training_mode"] or any(w is None for w in weights) or not _channels(x):
        return None
    momentum = round(float(named["momentum"]), 7)
    options = {"momentum": momentum, "epsilon": float(named["epsilon"])}
    return lambda: b.put(
        node.outputs[0], b.apply(keras.layers.BatchNormalization, node, b.get(x, "last"), weights, **options), "last"
    )


@row("LayerNormalization")
def _layer_normalization(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    x, rank = node.inputs[0], rank_of(node.inputs[0])
    scale = b.array(node.inputs[1])
    bias = b.array(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else None
    if x is None or rank is None or not b.is_tensor(x) or scale is None or named["axis"] % rank != rank - 1:
        return None
    if scale.ndim != 1 or (len(node.inputs) > 2 and (bias is None or bias.shape != scale.shape)):
        return None
    options: dict[str, Any] = {"epsilon": float(named["epsilon"]), "center": bias is not None}
    weights = [scale, *([] if bias is None else [bias])]
    return lambda: b.put(node.outputs[0], b.apply(keras.layers.LayerNormalization, node, b.get(x), weights, **options))


@row("MaxPool", "AveragePool")
def _pool(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    x, window = node.inputs[0], list(named["kernel_shape"])
    rank, is_max = len(window), node.op_type == "MaxPool"
    strides, pads = list(named.get("strides") or [1] * rank), _pads(named, rank)
    is_same = named["auto_pad"] == "SAME_UPPER"
    if x is None or not b.is_tensor(x) or (pads is None and not is_same) or rank not in _MAXIMA:
        return None
    if named["ceil_mode"] or any(dilation > 1 for dilation in named.get("dilations") or []):
        return None
    producer = x.producer()
    is_positive = producer is not None and producer.op_type in ("Relu", "Sigmoid")
    if pads is not None and any(map(any, pads)) and not (is_positive if is_max else named["count_include_pad"]):
        return None
    if is_same and not is_max and named["count_include_pad"]:
        return None
    options: dict[str, Any] = {"pool_size": window, "strides": strides, "padding": "same" if is_same else "valid"}

    def make() -> None:
        tensor = b.get(x, "last") if pads is None else _padded(b, node, b.get(x, "last"), pads)
        b.put(node.outputs[0], b.apply((_MAXIMA if is_max else _MEANS)[rank], node, tensor, **options), "last")

    return make


@row(*_GLOBAL, "ReduceMean")
def _global_pool(b: LayerBuilder, node: ir.Node, named: dict[str, Any]) -> Make | None:
    x, rank = node.inputs[0], rank_of(node.inputs[0])
    if x is None or rank is None or rank not in (3, 4, 5) or not b.is_tensor(x) or not _is_float(node):
        return None
    keeps = True
    if node.op_type == "ReduceMean":
        axes = b.array(node.inputs[1]) if len(node.inputs) > 1 else named.get("axes")
        if axes is None or sorted(int(axis) % rank for axis in axes) != [*range(2, rank)]:
            return None
        keeps = bool(named["keepdims"])
    layer = _GLOBAL.get(node.op_type, _GLOBAL["GlobalAveragePool"])[rank - 2]
    return lambda: b.put(
        node.outputs[0], b.apply(layer, node, b.get(x, "last"), keepdims=keeps), "last" if keeps else "first"
    )
