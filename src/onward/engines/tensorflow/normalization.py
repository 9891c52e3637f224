"""Normalization by statistics of the data. Those of narrow floats are taken in float32."""

from __future__ import annotations

import math

import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.tensorflow.convolution import channels_first, channels_last, per_channel
from onward.engines.tensorflow.tensors import dtype_of, sizes, wide

operators = Operators()


def _standardise(x, axes, epsilon):
    """The mean, the inverse of the deviation, and x standardised."""
    mean = tf.reduce_mean(x, axes, keepdims=True)
    centred = x - mean
    inverse = tf.math.rsqrt(tf.reduce_mean(tf.square(centred), axes, keepdims=True) + epsilon)
    return mean, inverse, centred * inverse


@operators.define("BatchNormalization")
def batch_normalization(x, scale, bias, mean, variance, *, epsilon, momentum, training_mode):
    """Channels last, which makes it twice as fast. What is the same for a channel is put together first."""
    last = channels_last(wide(x))
    used = old = [tf.cast(value, last.dtype) for value in (mean, variance)]
    if training_mode:  # not tf.nn.moments, whose second derivative is wrong: it takes the mean for a constant
        axes = list(range(x.shape.rank - 1))
        centre = tf.reduce_mean(last, axes)
        used = [centre, tf.reduce_mean(tf.square(last - centre), axes)]
    slope = tf.cast(scale, last.dtype) * tf.math.rsqrt(used[1] + epsilon)
    y = channels_first(tf.cast(last * slope + (tf.cast(bias, last.dtype) - used[0] * slope), x.dtype))
    if not training_mode:
        return y
    running = [before * momentum + now * (1 - momentum) for before, now in zip(old, used, strict=True)]
    return y, tf.cast(running[0], mean.dtype), tf.cast(running[1], variance.dtype)


@operators.define("LayerNormalization")
def layer_normalization(x, scale, bias=None, *, axis, epsilon, stash_type):
    axes = list(range(axis % x.shape.rank, x.shape.rank))
    mean, inverse, normal = _standardise(wide(x), axes, epsilon)
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
    normal = tf.reshape(_standardise(groups, [2], epsilon)[2], [-1, *image])
    return tf.cast(normal, x.dtype) * per_channel(scale, x.shape.rank - 2) + per_channel(bias, x.shape.rank - 2)


@operators.define("InstanceNormalization")
def instance_normalization(x, scale, bias, *, epsilon):
    rank = x.shape.rank - 2
    normal = _standardise(wide(x), list(range(2, x.shape.rank)), epsilon)[2]
    return tf.cast(normal, x.dtype) * per_channel(scale, rank) + per_channel(bias, rank)
