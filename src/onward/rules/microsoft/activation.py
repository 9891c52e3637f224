"""Activations and normalizations, alone and fused with the operators before them."""

import math

import onnx_ir as ir

from onward.rules import registry
from onward.rules.common import cast_like, rank
from onward.rules.microsoft.domain import as_length, count_up_to, rewrite
from onward.rules.normalization import axes_from

rewrite("Gelu")(lambda op, x: exact_gelu(op, x))
rewrite("BiasGelu")(lambda op, x, bias: exact_gelu(op, x + bias))
rewrite("FastGelu")(lambda op, x, bias: tanh_gelu(op, x if bias is None else x + bias))
rewrite("QuickGelu")(lambda op, x, *, alpha=1.702: x * op.Sigmoid(x * alpha))
rewrite("BiasAdd")(lambda op, x, bias, skip: x + bias + skip)
rewrite("GatedAdd")(lambda op, x, y, gate: x + y * gate)


@rewrite("BiasSplitGelu")
def bias_split_gelu(op, x, bias):
    left, right = op.Split(x + bias, outputs=2, axis=-1, num_outputs=2)
    return left * exact_gelu(op, right)


@rewrite("BiasSoftmax")
def bias_softmax(op, x, bias, *, axis=1):
    """Return the softmax over all axes from `axis` on."""
    scores = x + bias
    if axis == -1 or axis + 1 == rank(x):
        return op.Softmax(scores, axis=-1)
    return op.Reshape(op.Softmax(op.Flatten(scores, axis=axis), axis=-1), op.Shape(x))


@rewrite("BiasDropout")
def bias_dropout(op, x, bias, residual, ratio, training_mode, *, seed=None):
    y, mask = op.Dropout(x + bias, ratio, training_mode, outputs=2, seed=seed)
    return y if residual is None else y + residual, mask


def exact_gelu(op, x):
    if op.opset >= _GELU:
        return op.Gelu(x)
    return x * 0.5 * (op.Erf(x * math.sqrt(0.5)) + 1)


def tanh_gelu(op, x):
    if op.opset >= _GELU:
        return op.Gelu(x, approximate="tanh")
    return x * 0.5 * (op.Tanh((x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)) + 1)


_GELU = 20
"""First operator set with Gelu."""


def apply_activation(op, x, activation, alpha=None, beta=None, gamma=None):
    """Apply an activation by name; None or "" is the identity."""
    if not activation:
        return x
    if activation == "Clip":
        return op.Clip(x, alpha, beta)
    return op.node("", activation, x, alpha=alpha, beta=beta, gamma=gamma)


# ---- normalization ---------------------------------------------------------------------------------------------------


@registry.rewrite("SimplifiedLayerNormalization")  # ONNX Runtime has it in the standard domain
def simplified_layer_normalization(op, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """Return scale X / rms(X)."""
    return _over_rms(op, x, scale, axes_from(op, x, axis), epsilon, ir.DataType(stash_type))


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
    """Return the normalized sum of the embeddings of words, positions and segments, and the number of words."""
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
    """Return scale X / rms(X) silu(gate), for each slice of a row as long as `scale`."""
    slices = op.Reshape(x, op.Concat(op.Shape(x, end=-1), [-1], op.Shape(scale), axis=0))
    y, _ = _over_rms(op, slices, scale, [-1], epsilon, ir.DataType.FLOAT)
    return op.Reshape(y, op.Shape(x)) * (gate * op.Sigmoid(gate))


@rewrite("GroupNorm")
def group_norm(op, x, scale, shift, *, groups, activation, channels_last=1, epsilon=1e-5):
    return _group_norm(op, x, scale, shift, groups, activation, channels_last, epsilon)


@rewrite("SkipGroupNorm")
def skip_group_norm(op, x, scale, shift, skip, bias, *, groups, activation, channels_last=1, epsilon=1e-5):
    """Add skip and bias before the normalization. A skip of rank 2 has a number per channel of each image."""
    if rank(skip) == 2:
        skip = op.Unsqueeze(skip, [1, 2] if channels_last else [2, 3])
    if bias is not None and not channels_last:
        bias = op.Unsqueeze(bias, [1, 2])
    total = _sum(x, skip, bias)
    return _group_norm(op, total, scale, shift, groups, activation, channels_last, epsilon), total


def _sum(x, skip, bias):
    return x + skip if bias is None else x + skip + bias


def _over_rms(op, x, scale, axes, epsilon, dtype):
    """Return scale X / rms(X) and 1 / rms(X), computed in `dtype`."""
    wide = x if x.dtype == dtype else op.Cast(x, to=dtype)
    inverse = op.Reciprocal(op.Sqrt(op.ReduceMean(wide * wide, axes, keepdims=1) + epsilon))
    return cast_like(op, wide * inverse, scale) * scale, inverse


def _group_norm(op, x, scale, shift, groups, activation, channels_last, epsilon):
    """Standardize each group of channels of each image, then scale and shift by channel."""
    image = op.Transpose(x, perm=[0, 3, 1, 2]) if channels_last else x
    image = cast_like(op, image, scale)
    grouped = op.Reshape(image, [0, groups, -1])
    centered = grouped - op.ReduceMean(grouped, [2], keepdims=1)
    deviation = op.Sqrt(op.ReduceMean(centered * centered, [2], keepdims=1) + epsilon)
    y = op.Reshape(centered / deviation, op.Shape(image))
    y = y * op.Unsqueeze(scale, [1, 2]) + op.Unsqueeze(shift, [1, 2])
    y = y * op.Sigmoid(y) if activation else y
    return cast_like(op, op.Transpose(y, perm=[0, 2, 3, 1]) if channels_last else y, x)
