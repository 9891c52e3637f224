"""Normalization and random numbers. A node with a seed always draws the same numbers."""

from __future__ import annotations

import numpy as np

from onward.engines.framework import Operators
from onward.engines.numpy.types import in_float32, widen
from onward.engines.shared.arrays import dtype_of, per_channel

operators = Operators()


@operators.define("BatchNormalization")
def batch_normalization(x, scale, bias, mean, var, *, epsilon, momentum, training_mode):
    wide = widen(x)
    old_mean, old_var = widen(mean), widen(var)
    batch_mean, batch_var = old_mean, old_var
    if training_mode:
        axes = (0, *range(2, x.ndim))
        batch_mean, batch_var = wide.mean(axes), wide.var(axes)
    y = (wide - per_channel(batch_mean, x)) / np.sqrt(per_channel(batch_var, x) + epsilon)
    y = (y * per_channel(widen(scale), x) + per_channel(widen(bias), x)).astype(x.dtype)
    if not training_mode:
        return y
    new_mean = momentum * old_mean + (1 - momentum) * batch_mean
    new_var = momentum * old_var + (1 - momentum) * batch_var
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


# ---- random numbers --------------------------------------------------------------------------------------------------


@operators.define("Dropout")
def dropout(x, ratio=None, training_mode=None, *, seed):
    probability = 0.5 if ratio is None else ratio.item()
    if training_mode is None or not training_mode.item() or probability == 0:
        return x, np.ones(x.shape, bool)
    mask = _generator(seed).random(x.shape) >= probability
    scale = 1 / (1 - probability) if probability < 1 else 0
    return np.where(mask, widen(x) * scale, 0).astype(x.dtype), mask


@operators.define("Bernoulli")
def bernoulli(x, *, dtype, seed):
    return (_generator(seed).random(x.shape) < x).astype(_type(dtype, x))


@operators.define("Multinomial")
def multinomial(x, *, dtype, sample_size, seed):
    bounds = np.exp(x - x.max(1, keepdims=True)).cumsum(1)
    draws = _generator(seed).random((len(x), sample_size)) * bounds[:, -1:]
    return (draws[:, :, None] >= bounds[:, None, :]).sum(2).astype(dtype_of(dtype))


operators(
    RandomNormal=lambda *, dtype, mean, scale, seed, shape: _normal(shape, dtype_of(dtype), seed, mean, scale),
    RandomNormalLike=lambda x, *, dtype, mean, scale, seed: _normal(x.shape, _type(dtype, x), seed, mean, scale),
    RandomUniform=lambda *, dtype, high, low, seed, shape: _uniform(shape, dtype_of(dtype), seed, low, high),
    RandomUniformLike=lambda x, *, dtype, high, low, seed: _uniform(x.shape, _type(dtype, x), seed, low, high),
)


def _normal(shape, dtype, seed, mean, scale):
    return _generator(seed).normal(mean, scale, shape).astype(dtype)


def _uniform(shape, dtype, seed, low, high):
    return _generator(seed).uniform(low, high, shape).astype(dtype)


def _generator(seed):
    return np.random.default_rng(None if seed is None else np.float32(seed).view(np.uint32).item())


def _type(dtype, x):
    return x.dtype if dtype is None else dtype_of(dtype)
