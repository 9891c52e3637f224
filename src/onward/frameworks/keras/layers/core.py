"""Dense, shape, merge, attention and normalization layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import keras
import numpy as np
import onnx_ir as ir

from onward.build import Expr
from onward.frameworks.keras.layers import ROWS, Call, LayerTensor, Shape, accepted_arguments, elementwise, find, row
from onward.frameworks.keras.layers.activations import activate


@row("Identity", "ActivityRegularization")
def identity(c: Call, x: LayerTensor) -> LayerTensor:
    c.refuse_unless(type(c.layer).__name__ == "Identity", "adds to the loss what depends on its input")
    return x


@row("Dense")
def dense(c: Call, x: LayerTensor) -> LayerTensor:
    layer = c.layer
    c.refuse_unless(not layer.lora_enabled and not layer.quantization_mode, "is quantized or has adapters")
    return _with_bias(c, x.plain @ c.weight(layer.kernel), (*x.shape[:-1], layer.units))


@row("EinsumDense")
def einsum_dense(c: Call, x: LayerTensor) -> LayerTensor:
    return _with_bias(c, c.op.Einsum(x.plain, c.weight(c.layer.kernel), equation=c.layer.equation), c.shape)


def _with_bias(c: Call, y: Expr, shape: Shape) -> LayerTensor:
    """Add the bias of the layer along the last axis, and apply its activation."""
    y = y if c.layer.bias is None else y + c.weight(c.layer.bias)
    return activate(c, c.layer.activation, LayerTensor(shape, plain=y))


@row("Embedding")
def embedding(c: Call, x: LayerTensor) -> Expr:
    c.refuse_unless(not c.layer.mask_zero, "has `mask_zero`, and no mask is carried")
    c.refuse_unless(not c.layer.lora_enabled and not c.layer.quantization_mode, "is quantized or has adapters")
    x.below = min(x.below or c.layer.input_dim, c.layer.input_dim)
    indices = x.plain if x.plain.dtype == ir.DataType.INT64 else c.op.Cast(x.plain, to=ir.DataType.INT64)
    return c.op.Gather(c.weight(c.layer.embeddings), indices)


@row("TimeDistributed")
def time_distributed(c: Call, x: LayerTensor) -> Any:
    """Apply an inner layer that works along the last axis, so that time is one more batch axis."""
    inner = c.layer.layer
    c.refuse_unless(type(inner).__name__ in _PER_POSITION, f"applies {type(inner).__name__} at every time")
    function = find(inner)
    assert function is not None
    return function(c.of(inner), x, **accepted_arguments(function, {}))


_PER_POSITION = {"Dense", "Activation", "ReLU", "LeakyReLU", "ELU", "Dropout", "LayerNormalization", "Identity"}


@row("Flatten")
def flatten(c: Call, x: LayerTensor) -> Expr:
    if x.rank == 1:
        return c.op.Unsqueeze(x.plain, [1])
    y = x.plain
    if c.layer.data_format == "channels_first" and x.rank > 2:  # Keras moves the channels last before it flattens
        y = c.op.Transpose(y, perm=[0, *range(2, x.rank), 1])
    return c.op.Flatten(y, axis=1)


ROWS(
    Reshape=lambda c, x: c.op.Reshape(x.plain, [0, *c.layer.target_shape]),
    Permute=lambda c, x: c.op.Transpose(x.plain, perm=[0, *c.layer.dims]),
    RepeatVector=lambda c, x: c.op.Tile(c.op.Unsqueeze(x.plain, [1]), [1, c.layer.n, 1]),
)


@row("Rescaling")
def rescaling(c: Call, x: LayerTensor) -> LayerTensor | Expr:
    scale, offset = np.asarray(c.layer.scale, np.float32), np.asarray(c.layer.offset, np.float32)
    dtype = (x.moved if x.is_moved else x.plain).dtype
    is_integer = dtype is not None and dtype.is_integer()
    value = LayerTensor(x.shape, plain=c.op.Cast(x.plain, to=ir.DataType.FLOAT)) if is_integer else x
    if scale.ndim or offset.ndim:
        return value.plain * scale + offset
    return value.map(lambda e: e * float(c.layer.scale) + float(c.layer.offset))


@row("Normalization")
def normalization(c: Call, x: LayerTensor) -> Expr:
    c.refuse_unless(not c.layer.invert, "inverts a normalization")
    mean, deviation = (np.asarray(keras.ops.convert_to_numpy(v)) for v in (c.layer.mean, c.layer.variance**0.5))
    return (x.plain - mean) / np.maximum(deviation, np.float32(keras.config.epsilon()))


_PAIRS: dict[str, Callable[[Expr, Expr], Expr]] = {
    "Add": lambda a, b: a + b,
    "Subtract": lambda a, b: a - b,
    "Multiply": lambda a, b: a * b,
    "Divide": lambda a, b: a / b,
    "TrueDivide": lambda a, b: a / b,
    "Maximum": lambda a, b: a.op.Max(a, b),
    "Minimum": lambda a, b: a.op.Min(a, b),
}


@row(*_PAIRS)
def merge(c: Call, *operands: Any) -> LayerTensor | Expr:
    """Combine a list of tensors, or two operands of which one may be a number."""
    function = _PAIRS[type(c.layer).__name__]
    tensors = list(operands[0]) if isinstance(operands[0], list | tuple) else list(operands)
    if all(isinstance(x, LayerTensor) for x in tensors):
        c.refuse_unless(len({x.rank for x in tensors}) == 1, "joins tensors of different ranks")
        return elementwise(lambda *values: reduce(function, values), *tensors)
    a, b = tensors
    c.refuse_unless(np.ndim(b if isinstance(a, LayerTensor) else a) == 0, "joins a tensor with an array")
    if isinstance(a, LayerTensor):
        return a.map(lambda e: function(e, c.op.scalar(float(b), e)))
    return b.map(lambda e: function(c.op.scalar(float(a), e), e))


@row("Average")
def average(c: Call, tensors: Sequence[LayerTensor]) -> LayerTensor | Expr:
    return elementwise(lambda *values: reduce(_PAIRS["Add"], values) * (1.0 / len(values)), *tensors)


@row("Concatenate")
def concatenate(c: Call, tensors: Sequence[LayerTensor]) -> LayerTensor | Expr:
    axis = c.layer.axis % tensors[0].rank
    if axis == tensors[0].rank - 1 and all(x.is_moved for x in tensors):
        return LayerTensor(c.shape, moved=c.op.Concat(*(x.moved for x in tensors), axis=1))
    return c.op.Concat(*(x.plain for x in tensors), axis=axis)


@row("Dot")
def dot(c: Call, tensors: Sequence[LayerTensor]) -> Expr:
    a, b = tensors
    axes = c.layer.axes if isinstance(c.layer.axes, list | tuple) else (c.layer.axes, c.layer.axes)
    fits = a.rank == b.rank == 2 and not c.layer.normalize and all(axis % 2 == 1 for axis in axes)
    c.refuse_unless(fits, "is more than the product of vectors")
    return c.op.ReduceSum(a.plain * b.plain, [1], keepdims=1)


@row("UnitNormalization")
def unit_normalization(c: Call, x: LayerTensor) -> Expr:
    axes = [c.layer.axis] if isinstance(c.layer.axis, int) else list(c.layer.axis)
    norm = c.op.Sqrt(c.op.Max(c.op.ReduceSumSquare(x.plain, axes, keepdims=1), 1e-24))
    return x.plain / norm


@row("MultiHeadAttention")
def multi_head_attention(
    c: Call,
    query: LayerTensor,
    value: LayerTensor,
    key: LayerTensor | None = None,
    attention_mask: LayerTensor | None = None,
    use_causal_mask: bool = False,
) -> Expr:
    layer, op = c.layer, c.op
    c.refuse_unless(query.rank == value.rank == 3, "attends along several axes")
    c.refuse_unless(not layer._use_gate and layer._sliding_window is None, "has gates or a window")
    c.refuse_unless(len(layer.output_dense.kernel.shape) == 3, "has outputs of several axes")
    q = _heads(c, layer.query_dense, query) * (1 / math.sqrt(layer.key_dim))
    k, v = _heads(c, layer.key_dense, key or value, last=True), _heads(c, layer.value_dense, value)
    scores = q @ k
    if attention_mask is not None:
        mask = attention_mask.plain
        for _ in range(4 - attention_mask.rank):
            mask = op.Unsqueeze(mask, [-3])
        scores = op.Where(op.Cast(mask, to=ir.DataType.BOOL), scores, _MASKED)
    if use_causal_mask:
        lower = op.Trilu(op.filled_like(scores.value, 1.0), upper=0)
        scores = op.Where(lower > 0.0, scores, _MASKED)
    weights = op.Softmax(scores, axis=-1)
    if layer.dropout and not c.is_frozen:
        weights = op.Dropout(weights, np.float32(layer.dropout))
    context, projection = op.Transpose(weights @ v, perm=[0, 2, 1, 3]), layer.output_dense
    heads, size, width = projection.kernel.shape
    kernel = op.Reshape(c.weight(projection.kernel), [heads * size, width])
    y = op.Reshape(context, [0, 0, heads * size]) @ kernel
    return y if projection.bias is None else y + c.weight(projection.bias)


_MASKED = -1e9  # far below any score: its softmax is 0


def _heads(c: Call, projection: Any, x: LayerTensor, *, last: bool = False) -> Expr:
    """Project to [batch, heads, time, size]; with `last`, to [batch, heads, size, time]."""
    op, (width, heads, size) = c.op, projection.kernel.shape
    y = x.plain @ op.Reshape(c.weight(projection.kernel), [width, heads * size])
    if projection.bias is not None:
        y = y + op.Reshape(c.weight(projection.bias), [heads * size])
    return op.Transpose(op.Reshape(y, [0, 0, heads, size]), perm=[0, 2, 3, 1] if last else [0, 2, 1, 3])


@row("BatchNormalization")
def batch_normalization(c: Call, x: LayerTensor) -> LayerTensor:
    layer = c.layer
    axis = layer.axis % x.rank
    c.refuse_unless(axis in (1, x.rank - 1), f"normalizes along axis {axis}")
    c.refuse_unless(not layer.renorm if hasattr(layer, "renorm") else True, "renormalizes")
    last = axis == x.rank - 1
    mean, variance = c.weight(layer.moving_mean), c.weight(layer.moving_variance)
    if c.is_frozen:  # see `is_switchable`
        mean, variance = (c.op.Identity(x).like(x.value) for x in (mean, variance))
    y = c.op.BatchNormalization(
        x.moved if last else x.plain,
        _scale(c, mean, layer.gamma, 1.0),
        _scale(c, mean, layer.beta, 0.0),
        mean,
        variance,
        epsilon=float(layer.epsilon),
        momentum=float(layer.momentum),
    )
    return LayerTensor(x.shape, moved=y) if last else LayerTensor(x.shape, plain=y)


def _scale(c: Call, like: Expr, variable: Any, number: float) -> Expr:
    """Return a variable of the layer, or a constant vector if the layer has none.

    A constant scale means frozen statistics, so the vector is computed unless the layer is frozen.
    """
    if variable is not None:
        return c.weight(variable)
    constant = c.constant(np.full(like.value.shape.numpy(), number, like.dtype.numpy()))  # type: ignore[union-attr]
    return c.op.Identity(constant).like(like.value) if c.layer.trainable else constant


@row("LayerNormalization")
def layer_normalization(c: Call, x: LayerTensor) -> Expr:
    layer = c.layer
    axes = sorted(axis % x.rank for axis in ([layer.axis] if isinstance(layer.axis, int) else layer.axis))
    c.refuse_unless(axes == list(range(axes[0], x.rank)), f"normalizes along the axes {axes}")
    c.refuse_unless(not layer.rms_scaling, "scales by the root of the mean square")
    ones = np.ones([x.shape[a] or 1 for a in axes], np.float32)
    scale = c.constant(ones) if layer.gamma is None else c.weight(layer.gamma)
    bias = None if layer.beta is None else c.weight(layer.beta)
    return c.op.LayerNormalization(x.plain, scale, bias, axis=axes[0] - x.rank, epsilon=float(layer.epsilon))


@row("RMSNormalization")
def rms_normalization(c: Call, x: LayerTensor) -> Expr:
    layer = c.layer
    c.refuse_unless(layer.axis in (-1, [-1], x.rank - 1, [x.rank - 1]), f"normalizes along {layer.axis}")
    mean = c.op.ReduceMean(x.plain * x.plain, [-1], keepdims=1)
    return x.plain / c.op.Sqrt(mean + float(layer.epsilon)) * c.weight(layer.scale)


@row("GroupNormalization")
def group_normalization(c: Call, x: LayerTensor) -> LayerTensor:
    layer = c.layer
    last = layer.axis in (-1, x.rank - 1)
    c.refuse_unless(last or layer.axis == 1, f"normalizes along axis {layer.axis}")
    channels = int(x.shape[layer.axis])
    groups = channels if layer.groups == -1 else int(layer.groups)
    numbers = {"gamma": np.ones(channels, np.float32), "beta": np.zeros(channels, np.float32)}
    scale, bias = (
        c.constant(numbers[name]) if (variable := getattr(layer, name)) is None else c.weight(variable)
        for name in numbers
    )
    image = x.moved if last else x.plain
    y = c.op.GroupNormalization(image, scale, bias, num_groups=groups, epsilon=float(layer.epsilon))
    return LayerTensor(x.shape, moved=y) if last else LayerTensor(x.shape, plain=y)
