"""Normalization, losses and random numbers. Statistics of narrow floats use float32."""

from __future__ import annotations

import math

import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.tensorflow.spatial import channels_first, channels_last, per_channel
from onward.engines.tensorflow.types import dtype_of, scalar, sizes, wide

operators = Operators()


def _standardize(x, axes, epsilon):
    """Return the mean, the inverse of the deviation, and standardized x."""
    mean = tf.reduce_mean(x, axes, keepdims=True)
    centered = x - mean
    inverse = tf.math.rsqrt(tf.reduce_mean(tf.square(centered), axes, keepdims=True) + epsilon)
    return mean, inverse, centered * inverse


@operators.define("BatchNormalization")
def batch_normalization(x, scale, bias, mean, variance, *, epsilon, momentum, training_mode):
    """Normalize with channels last, which is twice as fast."""
    last = channels_last(wide(x))
    used = old = [tf.cast(value, last.dtype) for value in (mean, variance)]
    if training_mode:  # tf.nn.moments has a wrong second derivative: the mean is a constant to it
        axes = list(range(x.shape.rank - 1))
        center = tf.reduce_mean(last, axes)
        used = [center, tf.reduce_mean(tf.square(last - center), axes)]
    slope = tf.cast(scale, last.dtype) * tf.math.rsqrt(used[1] + epsilon)
    y = channels_first(tf.cast(last * slope + (tf.cast(bias, last.dtype) - used[0] * slope), x.dtype))
    if not training_mode:
        return y
    running = [before * momentum + now * (1 - momentum) for before, now in zip(old, used, strict=True)]
    return y, tf.cast(running[0], mean.dtype), tf.cast(running[1], variance.dtype)


@operators.define("LayerNormalization")
def layer_normalization(x, scale, bias=None, *, axis, epsilon, stash_type):
    axes = list(range(axis % x.shape.rank, x.shape.rank))
    mean, inverse, normal = _standardize(wide(x), axes, epsilon)
    y = tf.cast(normal, x.dtype) * scale
    stash = dtype_of(stash_type)
    return y if bias is None else y + bias, tf.cast(mean, stash), tf.cast(inverse, stash)


@operators.define("RMSNormalization")
def rms_normalization(x, scale, *, axis, epsilon):
    axes, wide_x = list(range(axis % x.shape.rank, x.shape.rank)), wide(x)
    square = tf.reduce_mean(tf.square(wide_x), axes, keepdims=True)
    return tf.cast(wide_x * tf.math.rsqrt(square + epsilon), scale.dtype) * scale


@operators.define("GroupNormalization")
def group_normalization(x, scale, bias, *, epsilon, num_groups):
    image = sizes(x, 1)
    groups = tf.reshape(wide(x), [-1, num_groups, math.prod(image) // num_groups])
    normal = tf.reshape(_standardize(groups, [2], epsilon)[2], [-1, *image])
    return tf.cast(normal, x.dtype) * per_channel(scale, x.shape.rank - 2) + per_channel(bias, x.shape.rank - 2)


@operators.define("InstanceNormalization")
def instance_normalization(x, scale, bias, *, epsilon):
    rank = x.shape.rank - 2
    normal = _standardize(wide(x), list(range(2, x.shape.rank)), epsilon)[2]
    return tf.cast(normal, x.dtype) * per_channel(scale, rank) + per_channel(bias, rank)


# ---- losses of class indices -----------------------------------------------------------------------------------------


@operators.define("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(scores, labels, weights=None, *, ignore_index, reduction, outputs):
    if outputs > 1:
        logarithms = tf.nn.log_softmax(scores, 1)
        return negative_log_likelihood(logarithms, labels, weights, ignore_index, reduction), logarithms
    classes, weight = _weigh_labels(labels, weights, ignore_index, scores.dtype)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, channels_last(scores))
    return _reduce(losses, weight, reduction)


@operators.define("NegativeLogLikelihoodLoss")
def _negative_log_likelihood(logarithms, labels, weights=None, *, ignore_index, reduction):
    return negative_log_likelihood(logarithms, labels, weights, ignore_index, reduction)


def negative_log_likelihood(logarithms, labels, weights, ignore_index, reduction):
    classes, weight = _weigh_labels(labels, weights, ignore_index, logarithms.dtype)
    losses = -tf.gather(channels_last(logarithms), classes, batch_dims=labels.shape.rank)
    return _reduce(losses, weight, reduction)


def _weigh_labels(labels, weights, ignore_index, dtype):
    """Return labels and their weights: both 0 for ignored labels. None if all weights are 1."""
    if ignore_index is None:
        return labels, None if weights is None else tf.gather(weights, labels)
    counts = labels != ignore_index
    classes = tf.where(counts, labels, 0)
    return classes, tf.where(
        counts, tf.ones([], dtype) if weights is None else tf.gather(weights, classes), tf.zeros([], dtype)
    )


def _reduce(losses, weight, reduction):
    losses = losses if weight is None else losses * weight
    if reduction == "none":
        return losses
    if reduction == "sum":
        return tf.reduce_sum(losses)
    if weight is None:
        return tf.reduce_mean(losses)
    total = tf.reduce_sum(weight)
    nothing = total == 0  # the mean is NaN, with the derivative 0
    mean = tf.reduce_sum(losses) / tf.where(nothing, scalar(1, total), total)
    return tf.where(nothing, scalar(math.nan, mean), mean)


# ---- random numbers, by TensorFlow's own generator -------------------------------------------------------------------


def _uniform(shape, dtype, seed, low=0.0, high=1.0):
    return tf.random.uniform(shape, low, high, dtype, _whole(seed))


def _normal(shape, dtype, seed, mean, scale):
    return tf.random.normal(shape, mean, scale, dtype, _whole(seed))


def _whole(seed):
    return None if seed is None else int(seed)


@operators.define("Dropout")
def dropout(x, ratio=None, training=None, *, seed):
    rate = 0.5 if ratio is None else float(ratio)
    if training is None or not training or rate == 0:
        return x, tf.ones_like(x, tf.bool)
    mask = _uniform(sizes(x), tf.float32, seed) >= rate
    return tf.where(mask, x / scalar(1 - rate, x), scalar(0, x)), mask


@operators.define("Bernoulli")
def bernoulli(p, *, dtype, seed):
    type_ = _like(p, dtype)
    return tf.cast(tf.cast(_uniform(sizes(p), tf.float32, seed), p.dtype) < p, type_)


@operators.define("Multinomial")
def multinomial(x, *, dtype, sample_size, seed):
    return tf.cast(tf.random.categorical(x, sample_size, tf.int64, _whole(seed)), dtype_of(dtype))


def _like(x, dtype):
    return x.dtype if dtype is None else dtype_of(dtype)


operators(
    RandomNormal=lambda *, dtype, mean, scale, seed, shape: _normal(shape, dtype_of(dtype), seed, mean, scale),
    RandomNormalLike=lambda x, *, dtype, mean, scale, seed: _normal(sizes(x), _like(x, dtype), seed, mean, scale),
    RandomUniform=lambda *, dtype, high, low, seed, shape: _uniform(shape, dtype_of(dtype), seed, low, high),
    RandomUniformLike=lambda x, *, dtype, high, low, seed: _uniform(sizes(x), _like(x, dtype), seed, low, high),
)
