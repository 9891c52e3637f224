"""Normalization. Means and variances are taken in float32 at least."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from onward.run.framework import Operators
from onward.run.jax.values import dtype_of

operators = Operators()


def _channels(parameter, x):
    return parameter.reshape(-1, *[1] * (x.ndim - 2))


@operators.define("BatchNormalization")
def batch_normalization(x, scale, bias, mean, variance, *, epsilon, momentum, training_mode, outputs):
    if not training_mode:
        return _batch_normalized(x, scale, bias, mean, variance, epsilon)
    over = (0, *range(2, x.ndim))
    exact = x.astype(jnp.promote_types(x.dtype, mean.dtype))
    batch_mean, batch_variance = jnp.mean(exact, over), jnp.var(exact, over)
    y = _batch_normalized(x, scale, bias, batch_mean, batch_variance, epsilon)
    running = (
        (old * momentum + new * (1 - momentum)).astype(old.dtype)
        for old, new in ((mean, batch_mean), (variance, batch_variance))
    )
    return (y, *running)


def _batch_normalized(x, scale, bias, mean, variance, epsilon):
    slope = scale * lax.rsqrt(variance + epsilon)
    return ((x - _channels(mean, x)) * _channels(slope, x) + _channels(bias, x)).astype(x.dtype)


@operators.define("LayerNormalization")
def layer_normalization(x, scale, bias=None, *, axis, epsilon, stash_type):
    over = tuple(range(axis % x.ndim, x.ndim))
    exact = x.astype(dtype_of(stash_type))
    mean = jnp.mean(exact, over, keepdims=True)
    deviation = exact - mean
    inverse = lax.rsqrt(jnp.mean(deviation * deviation, over, keepdims=True) + epsilon)
    y = (deviation * inverse).astype(x.dtype) * scale
    return y if bias is None else y + bias, mean, inverse


@operators.define("RMSNormalization")
def rms_normalization(x, scale, *, axis, epsilon, stash_type):
    over = tuple(range(axis % x.ndim, x.ndim))
    exact = x.astype(dtype_of(stash_type))
    inverse = lax.rsqrt(jnp.mean(exact * exact, over, keepdims=True) + epsilon)
    return (exact * inverse).astype(scale.dtype) * scale


def _standardized(x, over, epsilon):
    mean = jnp.mean(x, over, keepdims=True)
    deviation = x - mean
    return deviation * lax.rsqrt(jnp.mean(deviation * deviation, over, keepdims=True) + epsilon)


@operators.define("GroupNormalization")
def group_normalization(x, scale, bias, *, epsilon, num_groups, stash_type):
    groups = x.astype(dtype_of(stash_type)).reshape(len(x), num_groups, -1)
    normal = _standardized(groups, 2, epsilon).reshape(x.shape).astype(x.dtype)
    return normal * _channels(scale, x) + _channels(bias, x)


@operators.define("InstanceNormalization")
def instance_normalization(x, scale, bias, *, epsilon):
    normal = _standardized(x, tuple(range(2, x.ndim)), epsilon)
    return normal * _channels(scale, x) + _channels(bias, x)


@operators.define("LRN")
def lrn(x, *, alpha, beta, bias, size):
    window = (1, size, *[1] * (x.ndim - 2))
    around = [(0, 0), ((size - 1) // 2, size // 2), *[(0, 0)] * (x.ndim - 2)]
    squares = lax.reduce_window(x * x, x.dtype.type(0), lax.add, window, [1] * x.ndim, around)
    return x / (bias + alpha / size * squares) ** beta


@operators.define("LpNormalization")
def lp_normalization(x, *, axis, p):
    powers = jnp.sum(jnp.abs(x) ** p, axis, keepdims=True)
    norm = jnp.where(powers == 0, 0, jnp.where(powers == 0, 1, powers) ** (1 / p))
    return jnp.where(norm == 0, 0, x / jnp.where(norm == 0, 1, norm))
