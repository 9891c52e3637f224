"""Softmax, normalization layers, rotary embedding and dropout.

Statistics of float16 and bfloat16 are computed in float32, as the operators do; those of float64 stay float64.
"""

import functools
import operator

import numpy as np
import onnx_ir as ir

from onward.rules.common import cast_like, fixed_number, further_output, iota, rank
from onward.rules.indexing import merge_axes, shaped_like, split_axis
from onward.rules.registry import body, gradient
from onward.shapes import dims


@gradient("Softmax")
def softmax(op, dy, x, *, y, axis):
    """dX = Y (dY - sum(dY Y))."""
    y = without_masked_rows(op, y)
    weighted = dy * y
    return weighted - y * op.ReduceSum(weighted, [axis], keepdims=1)


def without_masked_rows(op, y):
    """Return a softmax with 0 in fully masked rows, which are NaN, if an IsNaN or Where replaces NaN in its result."""
    users = list(y.value.consumers())
    users += [user for cast in users if cast.op_type == "Cast" for user in cast.outputs[0].consumers()]
    return op.Where(op.IsNaN(y), 0, y) if any(user.op_type in ("IsNaN", "Where") for user in users) else y


@gradient("LogSoftmax")
def log_softmax(op, dy, x, *, y, axis):
    """dX = dY - exp(Y) sum(dY)."""
    return dy - op.Exp(y) * op.ReduceSum(dy, [axis], keepdims=1)


# ---- layers that normalize the last axes -----------------------------------------------------------------------------


@gradient("LayerNormalization", broadcasts=(1, 2))
def layer_normalization(op, dys, x, scale, bias, *, node, axis, epsilon):
    """N = (X - M) S, Y = N scale + bias: dX = S (dN - mean(dN) - N mean(dN N)) + (dM - S S N dS) / count."""
    dtype = _working_type(x)
    dy, dmean, dinverse = (_as(op, d, dtype) for d in (*dys, None, None)[:3])
    wide, axes = _as(op, x, dtype), axes_from(op, x, axis)
    if dtype is ir.DataType.FLOAT:
        mean, inverse = (further_output(op, node, i, dtype, _reduced_shape(x, axes)) for i in (1, 2))
        normal = (wide - mean) * inverse
    else:  # the outputs have less precision than X
        mean, inverse, normal = _standardize(op, wide, axes, epsilon)
    dx = None
    if dy is not None:
        dx = _through_statistics(op, dy * _as(op, scale, dtype), inverse, normal, axes)
    if dmean is not None or dinverse is not None:
        direct = [] if dmean is None else [dmean]
        direct += [] if dinverse is None else [-(inverse * inverse * normal * dinverse)]
        share = functools.reduce(operator.add, direct) / _count(op, x, mean)
        dx = share if dx is None else dx + share
    dscale = None if dy is None else dy * normal
    return (op.Expand(dx, op.Shape(x)) if dy is None else dx), dscale, dy


@gradient("RMSNormalization", broadcasts=(1,))
def rms_normalization(op, dy, x, scale, *, axis, epsilon):
    """N = X / sqrt(mean(X X) + epsilon), Y = N scale: dX = (dN - N mean(dN N)) / sqrt(mean(X X) + epsilon)."""
    dtype = _working_type(x)
    dy, wide, axes = _as(op, dy, dtype), _as(op, x, dtype), axes_from(op, x, axis)
    inverse = op.Reciprocal(op.Sqrt(_mean(op, wide * wide, axes) + epsilon))
    normal = wide * inverse
    dnormal = dy * _as(op, scale, dtype)
    return inverse * (dnormal - normal * _mean(op, dnormal * normal, axes)), dy * normal


@gradient("MeanVarianceNormalization")
def mean_variance_normalization(op, dy, x, *, axes):
    """Y = C / (D + 1e-9), C = X - mean(X), D = sqrt(mean(C C)); the derivative of D is 0 where D is 0."""
    dtype = _working_type(x)
    dy, x, axes = _as(op, dy, dtype), _as(op, x, dtype), list(axes)
    centered = x - _mean(op, x, axes)
    deviation = op.Sqrt(_mean(op, centered * centered, axes))
    direction = centered / op.Where(op.Equal(deviation, 0), 1, deviation)
    dcentered = dy / (deviation + 1e-9)
    along = direction * _mean(op, dcentered * centered, axes) / (deviation + 1e-9)
    return dcentered - _mean(op, dcentered, axes) - along


@body("LpNormalization", gradient=(0,))
def lp_normalization(op, x, *, p, axis):
    """Return X / |X|; if the norm is 0, the result and its derivative are 0."""
    powers = op.ReduceSum(op.Abs(x), [axis], keepdims=1) if p == 1 else op.ReduceSumSquare(x, [axis], keepdims=1)
    zero = op.Equal(powers, 0)
    safe = op.Where(zero, 1, powers)
    return op.Where(zero, 0, x / (safe if p == 1 else op.Sqrt(safe)))


# ---- layers that have channels, on axis 1 ----------------------------------------------------------------------------


@gradient("InstanceNormalization")
def instance_normalization(op, dy, x, scale, bias, *, epsilon):
    """N = (X - mean) / deviation of each channel of each sample, Y = N scale + bias."""
    dtype = _working_type(x)
    dy, wide, axes = _as(op, dy, dtype), _as(op, x, dtype), axes_from(op, x, 2)
    _, inverse, normal = _standardize(op, wide, axes, epsilon)
    dx = _through_statistics(op, dy * _per_channel(op, _as(op, scale, dtype), x), inverse, normal, axes)
    return dx, _channel_sum(op, dy * normal, x), _channel_sum(op, dy, x)


@gradient("GroupNormalization")
def group_normalization(op, dy, x, scale, bias, *, num_groups, epsilon):
    """As InstanceNormalization, for groups of channels; scale and bias are per group below opset 21."""
    dtype = _working_type(x)
    dy = _as(op, dy, dtype)
    _, inverse, normal = _standardize(op, _group_channels(op, _as(op, x, dtype), num_groups), [2], epsilon)
    scale = _as(op, scale, dtype)
    if op.opset < 21:
        dy = _group_channels(op, dy, num_groups)
        dx = _through_statistics(op, dy * op.Unsqueeze(scale, [1]), inverse, normal, [2])
        sums = [op.ReduceSum(d, [0, 2], keepdims=0) for d in (dy * normal, dy)]
        return shaped_like(op, dx, x), *sums
    dnormal = _group_channels(op, dy * _per_channel(op, scale, x), num_groups)
    dx = shaped_like(op, _through_statistics(op, dnormal, inverse, normal, [2]), x)
    return dx, _channel_sum(op, dy * shaped_like(op, normal, x), x), _channel_sum(op, dy, x)


def _group_channels(op, x, groups):
    """Return x as [batch, group, elements of the group]."""
    return merge_axes(op, split_axis(op, x, 1, groups), 2)


@gradient("BatchNormalization")
def batch_normalization(op, dys, x, scale, bias, mean, variance, *, ys, training_mode, momentum, epsilon):
    """N = (X - mean) / sqrt(variance + epsilon), Y = N scale + bias, for each channel."""
    dtype = _working_type(x, scale, mean)
    dys = [_as(op, d, dtype) for d in (*dys, None, None)[:3]]
    x, scale, mean, variance = (_as(op, value, dtype) for value in (x, scale, mean, variance))
    if training_mode:
        return _batch_normalization_in_training(op, dys, x, scale, ys, momentum, epsilon)
    dy = dys[0]
    inverse = op.Reciprocal(op.Sqrt(variance + epsilon))
    slope = scale * inverse
    dbias = _channel_sum(op, dy, x)
    dscale = _channel_sum(op, dy * (x - _per_channel(op, mean, x)), x) * inverse
    return dy * _per_channel(op, slope, x), dscale, dbias, -(slope * dbias), slope * inverse * dscale * -0.5


def _batch_normalization_in_training(op, dys, x, scale, ys, momentum, epsilon):
    """Return the same for the statistics of the batch, with which the running ones are updated by 1 - momentum."""
    dy, dmean, dvariance = dys
    mean, variance = _statistics_of_batch(op, x, ys, momentum)
    centered = x - _per_channel(op, mean, x)
    inverse = op.Reciprocal(op.Sqrt(variance + epsilon))
    count = _count(op, x, scale)
    terms, dscale, dbias = [], None, None
    if dy is not None:
        dscale, dbias = _channel_sum(op, dy * centered, x) * inverse, _channel_sum(op, dy, x)
        # dX = slope (dY - mean(dY) - N mean(dY N)). Products of numbers per channel come first. The slope stays
        # outside: the gradient of a convolution moves it to the weights.
        along = centered * _per_channel(op, dscale * inverse / count, x) + _per_channel(op, dbias / count, x)
        terms.append((dy - along) * _per_channel(op, scale * inverse, x))
    if dmean is not None:
        terms.append(_per_channel(op, dmean * (1 - momentum) / count, x))
    if dvariance is not None:
        terms.append(centered * _per_channel(op, dvariance * (2 * (1 - momentum)) / count, x))
    dx = functools.reduce(operator.add, terms)
    if dy is None and dvariance is None:
        dx = op.Expand(dx, op.Shape(x))
    return dx, dscale, dbias, *(None if d is None else d * momentum for d in (dmean, dvariance))


def _statistics_of_batch(op, x, ys, momentum):
    """Return mean and variance of each channel. With a momentum of 0, they are outputs of the operator."""
    if momentum == 0 and len(ys) == 3 and all(y.value.name for y in ys):
        return tuple(_as(op, y, x.dtype) for y in ys[1:])
    mean = _channel_mean(op, x, x)
    centered = x - _per_channel(op, mean, x)
    return mean, _channel_mean(op, centered * centered, x)


@body("LRN", gradient=(0,))
def lrn(op, x, *, alpha, beta, bias, size):
    """Return X S^-b, S = bias + a W(X X), with the sum W over near channels as a matmul with a band matrix."""
    before, after = (size - 1) // 2, size // 2
    shape = x.value.shape
    if x.dtype is not None and shape is not None and isinstance(shape[1], int):
        ones = np.ones((shape[1], shape[1]))
        band = op.constant(np.tril(np.triu(ones, -before), after), x.dtype)
    else:
        channels = iota(op, op.Squeeze(op.Shape(x, start=1, end=2), [0]))
        offset = op.Unsqueeze(channels, [0]) - op.Unsqueeze(channels, [1])
        band = op.CastLike(op.And(offset >= -before, offset <= after), x)
    sums = shaped_like(op, op.MatMul(band, merge_axes(op, x * x, 2)), x)
    return x * (sums * (alpha / size) + bias) ** -beta


@gradient("RotaryEmbedding")
def rotary_embedding(op, dy, x, cos, sin, positions, *, interleaved, num_heads, rotary_embedding_dim):
    """(A, B) -> (A cos - B sin, A sin + B cos): dX is dY rotated back, dcos = dY X summed over heads, dsin likewise."""
    attributes = {"interleaved": interleaved, "num_heads": num_heads, "rotary_embedding_dim": rotary_embedding_dim}
    dx = op.RotaryEmbedding(dy, cos, -sin, positions, **attributes)
    dtype = _working_type(x)
    (da, db), (a, b) = (_halves(op, _as(op, value, dtype), cos, interleaved, num_heads) for value in (dy, x))
    dcos = op.ReduceSum(da * a + db * b, [2], keepdims=0)
    dsin = op.ReduceSum(db * a - da * b, [2], keepdims=0)
    if positions is None:
        return dx, dcos, dsin
    rows = op.Reshape(positions, [-1, 1])

    def into_rows(values, cache):
        flat = op.Reshape(values, op.Concat([-1], op.Shape(cache, start=1), axis=0))
        zeros = cast_like(op, op.ConstantOfShape(op.Shape(cache)), flat)
        return op.ScatterElements(zeros, op.Expand(rows, op.Shape(flat)), flat, axis=0, reduction="add")

    return dx, into_rows(dcos, cos), into_rows(dsin, sin)


def rotated_halves(op, x, half, interleaved):
    """Split the elements that a rotary embedding rotates, the first 2 `half` of the last of four axes, into halves."""
    if interleaved:
        return tuple(op.Slice(x, [first], half * 2, [3], [2]) for first in (0, 1))
    return op.Slice(x, [0], half, [3]), op.Slice(x, half, half * 2, [3])


def _halves(op, x, cos, interleaved, num_heads):
    """Return the two halves of the rotated elements, each [batch, position, head, half]."""
    flat = rank(x) == 3 or (rank(x) is None and num_heads)
    x = split_axis(op, x, 2, num_heads) if flat else op.Transpose(x, perm=[0, 2, 1, 3])
    return rotated_halves(op, x, op.Shape(cos, start=-1), interleaved)


@gradient("Dropout", inputs=(0,))
def dropout(op, dy, x, ratio, training_mode, *, node):
    """dX = dY mask / (1 - ratio), with the mask of the forward pass; dX = dY outside training."""
    training = 0 if training_mode is None else fixed_number(training_mode)
    if training == 0:
        return dy
    scale = op.Reciprocal(1 - (op.scalar(0.5, dy) if ratio is None else cast_like(op, ratio, dy)))
    if training is None:
        scale = op.Where(training_mode, scale, 1)
    return op.Where(further_output(op, node, 1, ir.DataType.BOOL, x.value.shape), dy * scale, 0)


# ---- statistics and shapes -------------------------------------------------------------------------------------------


def _standardize(op, x, axes, epsilon):
    """Return the mean of x over `axes`, the inverse of its deviation, and x standardized."""
    mean = _mean(op, x, axes)
    centered = x - mean
    inverse = op.Reciprocal(op.Sqrt(_mean(op, centered * centered, axes) + epsilon))
    return mean, inverse, centered * inverse


def _through_statistics(op, dnormal, inverse, normal, axes):
    """Return the derivative of a standardized tensor."""
    along = normal * _mean(op, dnormal * normal, axes)
    return inverse * (dnormal - _mean(op, dnormal, axes) - along)


def _working_type(*values):
    """Return the type to compute in: float32, or float64 if a value is; None if a type is not known."""
    dtypes = [value.dtype for value in values]
    if None in dtypes:
        return None
    return ir.DataType.DOUBLE if ir.DataType.DOUBLE in dtypes else ir.DataType.FLOAT


def _as(op, value, dtype):
    return value if value is None or dtype is None or value.dtype == dtype else op.Cast(value, to=dtype)


def _reduced_shape(x, axes):
    """Return the shape of x with size 1 on `axes`; None if it is not known."""
    if not isinstance(axes, list) or x.value.shape is None:
        return None
    reduced = {axis % rank(x) for axis in axes}
    return ir.Shape([1 if i in reduced else n for i, n in enumerate(x.value.shape)])


def axes_from(op, x, first):
    """Return all axes from `first` on: a list, or a tensor if the rank is not known."""
    if first < 0:
        return list(range(first, 0))
    if rank(x) is not None:
        return list(range(first, rank(x)))
    return op.Range(np.int64(first), op.Size(op.Shape(x)), np.int64(1))


def _all_but_channel(op, x):
    rest = axes_from(op, x, 2)
    return [0, *rest] if isinstance(rest, list) else op.Concat([0], rest, axis=0)


def _mean(op, x, axes):
    if isinstance(axes, list) and not axes:
        return x
    return op.ReduceMean(x, axes, keepdims=1, noop_with_empty_axes=None if isinstance(axes, list) else 1)


def _per_channel(op, values, x):
    """Reshape one value per channel to broadcast with x, whose channels are on axis 1."""
    if rank(x) is None:
        ones = op.ConstantOfShape(op.Max(op.Shape(op.Shape(x)) - 2, 0), value=np.ones(1, np.int64))
        return op.Reshape(values, op.Concat([-1], ones, axis=0))
    return op.Unsqueeze(values, list(range(1, rank(x) - 1))) if rank(x) > 2 else values


def _channel_sum(op, values, x):
    """Sum over all axes except 1; a vector has one channel."""
    total = op.ReduceSum(values, _all_but_channel(op, x), keepdims=0)
    return total if (rank(x) or 0) > 1 else op.Reshape(total, [-1])


def _channel_mean(op, values, x):
    mean = op.ReduceMean(values, _all_but_channel(op, x), keepdims=0)
    return mean if (rank(x) or 0) > 1 else op.Reshape(mean, [-1])


def _count(op, whole, group):
    """Return the number of elements of `whole` per element of `group`, in the type of `group`."""
    sizes = dims(whole.value), dims(group.value)
    if all(size is not None and all(isinstance(n, int) and n > 0 for n in size) for size in sizes):
        elements, groups = (int(np.prod(size)) for size in sizes)
        return elements // groups
    return op.CastLike(op.Size(whole), group) / op.CastLike(op.Size(group), group)
