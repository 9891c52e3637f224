"""Normalizations."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.precision import in_float32, widen
from onward.engines.shared.arrays import dtype_of, per_channel

operators = Operators()


@operators.define("BatchNormalization")
def batch_normalization(x, scale, bias, mean, var, *, epsilon, momentum, training_mode):
    wide = widen(x)
    old_mean, old_var = widen(mean), widen(var)
    here_mean, here_var = old_mean, old_var
    if training_mode:
        axes = (0, *range(2, x.ndim))
        here_mean, here_var = wide.mean(axes), wide.var(axes)
    y = (wide - per_channel(here_mean, x)) / np.sqrt(per_channel(here_var, x) + epsilon)
    y = (y * per_channel(widen(scale), x) + per_channel(widen(bias), x)).astype(x.dtype)
    if not training_mode:
        return y
    new_mean = momentum * old_mean + (1 - momentum) * here_mean
    new_var = momentum * old_var + (1 - momentum) * here_var
    return y, new_mean.astype(mean.dtype), new_var.astype(var.dtype)


@operators.define("LayerNormalization")
def layer_normalization(x, scale, bias=None, *, axis, epsilon, stash_type):
    wide = x.astype(dtype_of(stash_type))
    axes = tuple(range(axis % x.ndim, x.ndim))
    mean = wide.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt(wide.var(axes, keepdims=True) + epsilon)
    y = ((wide - mean) * inverse).astype(x.dtype) * scale
    return y if bias is None else y + bias, mean, inverse


@operators.define("RMSNormalization")
def rms_normalization(x, scale, *, axis, epsilon, stash_type):
    wide = x.astype(dtype_of(stash_type))
    axes = tuple(range(axis % x.ndim, x.ndim))
    y = wide / np.sqrt(np.square(wide).mean(axes, keepdims=True) + epsilon)
    return (y.astype(scale.dtype) * scale).astype(scale.dtype)


@operators.define("GroupNormalization")
def group_normalization(x, scale, bias, *, epsilon, num_groups, stash_type):
    groups = x.astype(dtype_of(stash_type)).reshape(len(x), num_groups, -1)
    y = _standardize(groups, (2,), epsilon).reshape(x.shape).astype(x.dtype)
    return y * per_channel(scale, x) + per_channel(bias, x)


@operators.define("InstanceNormalization")
@in_float32
def instance_normalization(x, scale, bias, *, epsilon):
    y = _standardize(x, tuple(range(2, x.ndim)), epsilon)
    return y * per_channel(scale, x) + per_channel(bias, x)


def _standardize(x, axes, epsilon):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + epsilon)
