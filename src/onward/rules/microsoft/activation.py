"""Activations and normalizations, alone and together with what comes before them."""

import math

import numpy as np
import onnx_ir as ir

from onward.rules import registry
from onward.rules.common import cast_like
from onward.rules.microsoft.domain import as_length, count_up_to, rank, rewrite


@rewrite("Gelu")
def gelu(op, x):
    return exact_gelu(op, x)


@rewrite("BiasGelu")
def bias_gelu(op, x, bias):
    return exact_gelu(op, x + bias)


@rewrite("FastGelu")
def fast_gelu(op, x, bias):
    return tanh_gelu(op, x if bias is None else x + bias)


@rewrite("QuickGelu")
def quick_gelu(op, x, *, alpha=1.702):
    return x * op.Sigmoid(x * alpha)


@rewrite("BiasSplitGelu")
def bias_split_gelu(op, x, bias):
    left, right = op.Split(x + bias, outputs=2, axis=-1, num_outputs=2)
    return left * exact_gelu(op, right)


@rewrite("BiasAdd")
def bias_add(op, x, bias, skip):
    return x + bias + skip


@rewrite("GatedAdd")
def gated_add(op, x, y, gate):
    return x + y * gate


@rewrite("BiasSoftmax")
def bias_softmax(op, x, bias, *, axis=1):
    """Softmax over all axes from `axis` on."""
    scores = x + bias
    if axis == -1 or axis + 1 == rank(x):
        return op.Softmax(scores, axis=-1)
    return op.Reshape(op.Softmax(op.Flatten(scores, axis=axis), axis=-1), op.Shape(x))


@rewrite("BiasDropout")
def bias_dropout(op, x, bias, residual, ratio, training_mode, *, seed=None):
    y, mask = op.Dropout(x + bias, ratio, training_mode, outputs=2, seed=seed)
    return y if residual is None else y + residual, mask


# ---- what they share -------------------------------------------------------------------------------------------------


def exact_gelu(op, x):
    """x times the probability that a normal number is less than x."""
    if op.opset >= _GELU:
        return op.Gelu(x)
    return x * 0.5 * (op.Erf(x * math.sqrt(0.5)) + 1)


def tanh_gelu(op, x):
    """The usual approximation of it."""
    if op.opset >= _GELU:
        return op.Gelu(x, approximate="tanh")
    return x * 0.5 * (op.Tanh((x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)) + 1)


_GELU = 20
"""The operator set from which on the standard has Gelu."""


def apply_activation(op, x, activation, alpha=None, beta=None, gamma=None):
    """An activation by its name, with the parameters that it has."""
    if not activation:
        return x
    if activation == "Clip":
        return op.Clip(x, alpha, beta)
    return op.node("", activation, x, alpha=alpha, beta=beta, gamma=gamma)


# ---- normalization ---------------------------------------------------------------------------------------------------


@registry.rewrite("SimplifiedLayerNormalization")  # which ONNX Runtime has in the domain of the standard
def simplified_layer_normalization(op, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """Y = scale X / rms(X)."""
    if axis < 0:
        axes = list(range(axis, 0))
    elif x.value.shape is not None:
        axes = list(range(axis, x.value.shape.rank()))
    else:
        axes = op.Range(np.int64(axis), op.Size(op.Shape(x)), np.int64(1))
    return _over_rms(op, x, scale, axes, epsilon, ir.DataType(stash_type))


@rewrite("SkipSimplifiedLayerNormalization")
def skip_simplified_layer_normalization(op, x, skip, scale, bias, *, epsilon=1e-12):
    total = _sum(x, skip, bias)
    y, inverse = _over_rms(op, total, scale, [-1], epsilon, ir.DataType.FLOAT)
    return y, None, inverse, total


@rewrite("SkipLayerNormalization")
def skip_layer_normalization(op, x, skip, scale, shift, bias, *, epsilon=1e-12):
    total = _sum(x, skip, bias)
    y, mean, inverse = op.LayerNormalization(total, scale, shift, outputs=3, axis=-1, epsilon=epsilon)
    return y, mean, inverse, total


@rewrite("EmbedLayerNormalization")
def embed_layer_normalization(
    op, words, segments, word_table, position_table, segment_table, scale, shift, mask, positions, *, epsilon=1e-12,
):  # fmt: skip
    """The sum of what words, positions and segments stand for, normalised; and how many words there are."""
    if positions is None:
        positions = count_up_to(op, op.Shape(words, start=1, end=2))
    total = op.Gather(word_table, words, axis=0) + op.Gather(position_table, positions, axis=0)
    if segments is not None:
        total = total + op.Gather(segment_table, segments, axis=0)
    y = op.LayerNormalization(total, scale, shift, axis=-1, epsilon=epsilon)
    present = op.Equal(as_length(op, words if mask is None else mask), 1)
    count = op.ReduceSum(op.Cast(present, to=ir.DataType.INT32), [1], keepdims=0)
    return y, count if mask is not None else count * 0, total


@rewrite("GatedRMSNorm")
def gated_rms_norm(op, x, scale, gate, *, epsilon=1e-5):
    """Y = scale X / rms(X) silu(gate), for each part of a row that is as long as `scale`."""
    parts = op.Reshape(x, op.Concat(op.Shape(x, end=-1), [-1], op.Shape(scale), axis=0))
    y, _ = _over_rms(op, parts, scale, [-1], epsilon, ir.DataType.FLOAT)
    return op.Reshape(y, op.Shape(x)) * (gate * op.Sigmoid(gate))


@rewrite("GroupNorm")
def group_norm(op, x, scale, shift, *, groups, activation, channels_last=1, epsilon=1e-5):
    return _group_norm(op, x, scale, shift, groups, activation, channels_last, epsilon)


@rewrite("SkipGroupNorm")
def skip_group_norm(op, x, scale, shift, skip, bias, *, groups, activation, channels_last=1, epsilon=1e-5):
    """A skip of rank 2 is one number for each channel of each image."""
    if skip.value.shape is not None and skip.value.shape.rank() == 2:
        skip = op.Unsqueeze(skip, [1, 2] if channels_last else [2, 3])
    if bias is not None and not channels_last:
        bias = op.Unsqueeze(bias, [1, 2])
    total = _sum(x, skip, bias)
    return _group_norm(op, total, scale, shift, groups, activation, channels_last, epsilon), total


# ---- what they share -------------------------------------------------------------------------------------------------


def _sum(x, skip, bias):
    return x + skip if bias is None else x + skip + bias


def _over_rms(op, x, scale, axes, epsilon, dtype):
    """X over the root of the mean of its squares, computed in `dtype`, times scale; and the inverse of that root."""
    wide = x if x.dtype == dtype else op.Cast(x, to=dtype)
    inverse = op.Reciprocal(op.Sqrt(op.ReduceMean(wide * wide, axes, keepdims=1) + epsilon))
    return cast_like(op, wide * inverse, scale) * scale, inverse


def _group_norm(op, x, scale, shift, groups, activation, channels_last, epsilon):
    """Each group of channels of each image standardised, then scaled and shifted by channel."""
    image = op.Transpose(x, perm=[0, 3, 1, 2]) if channels_last else x
    image = cast_like(op, image, scale)
    parts = op.Reshape(image, [0, groups, -1])
    centred = parts - op.ReduceMean(parts, [2], keepdims=1)
    deviation = op.Sqrt(op.ReduceMean(centred * centred, [2], keepdims=1) + epsilon)
    y = op.Reshape(centred / deviation, op.Shape(image))
    y = y * op.Unsqueeze(scale, [1, 2]) + op.Unsqueeze(shift, [1, 2])
    y = y * op.Sigmoid(y) if activation else y
    return cast_like(op, op.Transpose(y, perm=[0, 2, 3, 1]) if channels_last else y, x)
