"""Normalization."""

from __future__ import annotations

import math

import keras
from keras import ops

from onward.engines.framework import Operators
from onward.engines.keras.values import available, dtype_of

operators = Operators()


def channels(parameter, x):
    return ops.reshape(parameter, (-1, *[1] * (len(x.shape) - 2)))


@operators.define("BatchNormalization")
def batch_normalization(x, scale, bias, mean, variance, *, epsilon=1e-5, momentum=0.9, training_mode=0):
    """In training also the statistics as they are now. Channels come last where that is faster."""
    last = keras.backend.backend() == "tensorflow"
    x = ops.moveaxis(x, 1, -1) if last else x
    channel = len(x.shape) - 1 if last else 1
    over = [axis for axis in range(len(x.shape)) if axis != channel]

    def spread(parameter):
        return parameter if last else channels(parameter, x)

    here, there = mean, variance
    if training_mode:
        here = ops.mean(x, over)
        there = ops.mean(ops.square(x - spread(here)), over)
    slope = scale * ops.rsqrt(there + epsilon)
    y = ops.cast(x * spread(slope) + spread(bias - here * slope), dtype_of(x))
    y = ops.moveaxis(y, -1, 1) if last else y
    if not training_mode:
        return y
    return y, mean * momentum + here * (1 - momentum), variance * momentum + there * (1 - momentum)


def last_axes(x, axis):
    return tuple(range(axis % len(x.shape), len(x.shape)))


@operators.define("LayerNormalization")
def layer_normalization(x, scale, bias=None, *, axis=-1, epsilon=1e-5, stash_type="float32"):
    """Also the mean and the inverse of the deviation."""
    exact = ops.cast(x, available(stash_type))
    mean = ops.mean(exact, last_axes(x, axis), keepdims=True)
    deviation = exact - mean
    inverse = ops.rsqrt(ops.mean(ops.square(deviation), last_axes(x, axis), keepdims=True) + epsilon)
    y = ops.cast(deviation * inverse, dtype_of(x)) * scale
    return y if bias is None else y + bias, mean, inverse


@operators.define("RMSNormalization")
def rms_normalization(x, scale, *, axis=-1, epsilon=1e-5, stash_type="float32"):
    exact = ops.cast(x, available(stash_type))
    inverse = ops.rsqrt(ops.mean(ops.square(exact), last_axes(x, axis), keepdims=True) + epsilon)
    return ops.cast(exact * inverse, dtype_of(scale)) * scale


def standardize(x, over, epsilon):
    deviation = x - ops.mean(x, over, keepdims=True)
    return deviation * ops.rsqrt(ops.mean(ops.square(deviation), over, keepdims=True) + epsilon)


@operators.define("GroupNormalization")
def group_normalization(x, scale, bias, *, epsilon=1e-5, num_groups, stash_type="float32"):
    size = math.prod(x.shape[1:]) // num_groups
    groups = ops.reshape(ops.cast(x, available(stash_type)), (-1, num_groups, size))
    normal = ops.cast(ops.reshape(standardize(groups, 2, epsilon), (-1, *x.shape[1:])), dtype_of(x))
    return normal * channels(scale, x) + channels(bias, x)


@operators.define("InstanceNormalization")
def instance_normalization(x, scale, bias, *, epsilon=1e-5):
    return standardize(x, tuple(range(2, len(x.shape))), epsilon) * channels(scale, x) + channels(bias, x)
