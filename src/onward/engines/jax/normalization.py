"""Normalization. Means and variances are taken in float32 at least."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from onward.engines.framework import Operators
from onward.engines.shared.arrays import dtype_of, per_channel

operators = Operators()


@operators.define("BatchNormalization")
def batch_normalization(x, scale, bias, mean, variance, *, epsilon, momentum, training_mode, outputs):
    exact = x.astype(jnp.promote_types(x.dtype, mean.dtype))
    if not training_mode:
        return _normalize_by(exact, scale, bias, mean, variance, epsilon).astype(x.dtype)
    y, *found = _normalize_by_batch(exact, scale, bias, epsilon)
    running = (
        (old * momentum + new * (1 - momentum)).astype(old.dtype)
        for old, new in zip((mean, variance), found, strict=True)
    )
    return (y.astype(x.dtype), *running)


def _normalize_by(x, scale, bias, mean, variance, epsilon):
    return (x - per_channel(mean, x)) * per_channel(scale * lax.rsqrt(variance + epsilon), x) + per_channel(bias, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _normalize_by_batch(x, scale, bias, epsilon):
    """y, and mean and variance of x.

    The variance is the mean square of distances to one of the elements, less the square of their mean: it needs no
    mean beforehand, so that x is read but once, and loses no digits where the mean is large.
    """
    one = x[(0, slice(None), *[0] * (x.ndim - 2))]
    distance = x - per_channel(one, x)
    shift, square = _mean(distance), _mean(distance * distance)
    mean, variance = one + shift, jnp.maximum(square - shift * shift, 0)
    return _normalize_by(x, scale, bias, mean, variance, epsilon), mean, variance


@_normalize_by_batch.defjvp
def _normalize_by_batch_tangent(epsilon, inputs, tangents):
    """Such that the gradient has two sums: that of dy, and that of dy with normalized x."""
    x, scale, bias = inputs
    dx, dscale, dbias = tangents
    y, mean, variance = _normalize_by_batch(x, scale, bias, epsilon)
    inverse = lax.rsqrt(variance + epsilon)
    normal = (x - per_channel(mean, x)) * per_channel(inverse, x)
    slope, dmean, along = scale * inverse, _mean(dx), _mean(normal * dx)
    by_normal, constant = dscale - slope * along, dbias - slope * dmean
    dy = dx * per_channel(slope, x) + normal * per_channel(by_normal, x) + per_channel(constant, x)
    return (y, mean, variance), (dy.astype(y.dtype), dmean, 2 * along / inverse)


def _mean(x):
    """By channels."""
    return jnp.mean(x, (0, *range(2, x.ndim)))


@operators.define("LayerNormalization")
def layer_normalization(x, scale, bias=None, *, axis, epsilon, stash_type):
    over = tuple(range(axis % x.ndim, x.ndim))
    normal, mean, inverse = _standardize(x.astype(dtype_of(stash_type)), over, epsilon)
    y = normal.astype(x.dtype) * scale
    return y if bias is None else y + bias, mean, inverse


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _standardize(x, over, epsilon):
    """Normalized x, its mean, and the inverse of its standard deviation."""
    mean = jnp.mean(x, over, keepdims=True)
    deviation = x - mean
    inverse = lax.rsqrt(jnp.mean(deviation * deviation, over, keepdims=True) + epsilon)
    return deviation * inverse, mean, inverse


@_standardize.defjvp
def _standardize_tangent(over, epsilon, inputs, tangents):
    """Mean and deviation are taken from the forward pass: XLA would rather compute them again, in several kernels."""
    (x,), (dx,) = inputs, tangents
    normal, mean, inverse = _standardize(x, over, epsilon)
    kept_mean, kept = lax.optimization_barrier((mean, inverse))
    same = (x - kept_mean) * kept
    dmean, along = jnp.mean(dx, over, keepdims=True), jnp.mean(same * dx, over, keepdims=True)
    return (normal, mean, inverse), ((dx - dmean - same * along) * kept, dmean, -kept * kept * along)


@operators.define("RMSNormalization")
def rms_normalization(x, scale, *, axis, epsilon, stash_type):
    over = tuple(range(axis % x.ndim, x.ndim))
    exact = x.astype(dtype_of(stash_type))
    inverse = lax.rsqrt(jnp.mean(exact * exact, over, keepdims=True) + epsilon)
    return (exact * inverse).astype(scale.dtype) * scale


@operators.define("GroupNormalization")
def group_normalization(x, scale, bias, *, epsilon, num_groups, stash_type):
    groups = x.astype(dtype_of(stash_type)).reshape(len(x), num_groups, -1)
    normal = _standardize(groups, 2, epsilon)[0].reshape(x.shape).astype(x.dtype)
    return normal * per_channel(scale, x) + per_channel(bias, x)


@operators.define("InstanceNormalization")
def instance_normalization(x, scale, bias, *, epsilon):
    normal = _standardize(x, tuple(range(2, x.ndim)), epsilon)[0]
    return normal * per_channel(scale, x) + per_channel(bias, x)
