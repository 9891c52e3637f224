"""Normalization, attention, losses and random numbers. Statistics use float32 or more."""

from __future__ import annotations

import contextvars
import functools
import math
import secrets

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.engines.framework import Operators
from onward.engines.jax.elementwise import softmax
from onward.engines.shared.arrays import dtype_of, per_channel
from onward.engines.shared.movement import short, wrap_indices

operators = Operators()


@operators.define("BatchNormalization")
def batch_normalization(x, scale, bias, mean, variance, *, epsilon, momentum, training_mode, outputs):
    exact = x.astype(jnp.promote_types(x.dtype, mean.dtype))
    if not training_mode:
        return _normalize_by(exact, scale, bias, mean, variance, epsilon).astype(x.dtype)
    y, *statistics = _normalize_by_batch(exact, scale, bias, epsilon)
    running = (
        (old * momentum + new * (1 - momentum)).astype(old.dtype)
        for old, new in zip((mean, variance), statistics, strict=True)
    )
    return (y.astype(x.dtype), *running)


def _normalize_by(x, scale, bias, mean, variance, epsilon):
    return (x - per_channel(mean, x)) * per_channel(scale * lax.rsqrt(variance + epsilon), x) + per_channel(bias, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _normalize_by_batch(x, scale, bias, epsilon):
    """Return y, and mean and variance of x, by one read of x.

    The variance is E[d²] - E[d]² of the distances d to one element, which keeps digits if the mean
    is large.
    """
    origin = x[(0, slice(None), *[0] * (x.ndim - 2))]
    distance = x - per_channel(origin, x)
    shift, square = _mean(distance), _mean(distance * distance)
    mean, variance = origin + shift, jnp.maximum(square - shift * shift, 0)
    return _normalize_by(x, scale, bias, mean, variance, epsilon), mean, variance


@_normalize_by_batch.defjvp
def _normalize_by_batch_tangent(epsilon, inputs, tangents):
    """Return tangents whose transpose has two sums: dy, and dy times normalized x."""
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
    """Return the mean of each channel."""
    return jnp.mean(x, (0, *range(2, x.ndim)))


@operators.define("LayerNormalization")
def layer_normalization(x, scale, bias=None, *, axis, epsilon, stash_type):
    over = tuple(range(axis % x.ndim, x.ndim))
    normal, mean, inverse = _standardize(x.astype(dtype_of(stash_type)), over, epsilon)
    y = normal.astype(x.dtype) * scale
    return y if bias is None else y + bias, mean, inverse


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _standardize(x, over, epsilon):
    """Return normalized x, its mean, and the inverse of its standard deviation."""
    mean = jnp.mean(x, over, keepdims=True)
    deviation = x - mean
    inverse = lax.rsqrt(jnp.mean(deviation * deviation, over, keepdims=True) + epsilon)
    return deviation * inverse, mean, inverse


@_standardize.defjvp
def _standardize_tangent(over, epsilon, inputs, tangents):
    (x,), (dx,) = inputs, tangents
    normal, mean, inverse = _standardize(x, over, epsilon)
    # Without the barrier, XLA computes mean and deviation again, in several kernels.
    stored_mean, stored = lax.optimization_barrier((mean, inverse))
    same = (x - stored_mean) * stored
    dmean, along = jnp.mean(dx, over, keepdims=True), jnp.mean(same * dx, over, keepdims=True)
    return (normal, mean, inverse), ((dx - dmean - same * along) * stored, dmean, -stored * stored * along)


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


# ---- attention -------------------------------------------------------------------------------------------------------


@operators.define("Attention")
def attention(q, k, v, mask=None, *, is_causal, kv_num_heads=None, q_num_heads=None, scale=None, fused=False):
    """Return attention. `fused` permits the kernel of cuDNN, for 16 bits."""
    packed = q.ndim == 3
    if packed:
        q, k, v = _heads(q, q_num_heads), _heads(k, kv_num_heads), _heads(v, kv_num_heads)
    if q.shape[1] != k.shape[1]:
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    if fused and mask is None and _has_kernel(q, k, v):
        y = _fused_attention(q, k, v, is_causal, scale)
        return y.reshape(*y.shape[:2], -1) if packed else y.swapaxes(1, 2)
    root = math.sqrt(1 / math.sqrt(q.shape[3]) if scale is None else scale)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q * root, k * root)
    if mask is not None:
        scores = _apply_mask(scores, mask)
    if is_causal:
        scores = jnp.where(np.tri(*scores.shape[2:], dtype=bool), scores, -np.inf)
    weights = softmax(scores, -1)
    if mask is not None:  # a query that attends to no key gets zeros
        weights = jnp.where(jnp.max(scores, -1, keepdims=True) == -np.inf, 0, weights)
    y = jnp.einsum("bhqk,bhkd->bhqd", weights, v)
    return y.swapaxes(1, 2).reshape(len(y), y.shape[2], -1) if packed else y


derivatives: contextvars.ContextVar[int] = contextvars.ContextVar("derivatives", default=0)
"""Number of nested derivatives: fused attention has only a first derivative."""


def _has_kernel(q, k, v):
    sizes = {x.shape[-1] for x in (q, k, v)}
    half = all(x.dtype in (jnp.bfloat16, jnp.float16) for x in (q, k, v))
    return half and len(sizes) == 1 and max(sizes) <= 128 and max(sizes) % 8 == 0 and derivatives.get() < 2


def _fused_attention(q, k, v, is_causal, scale):
    """Return attention as (batch, length, heads, size)."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=bool(is_causal), implementation="cudnn")


def _heads(x, count):
    """Convert (batch, length, heads * size) to (batch, heads, length, size)."""
    return x.reshape(*x.shape[:2], count, -1).swapaxes(1, 2)


def _apply_mask(scores, mask):
    """Apply a mask. Keys beyond its end are masked, too."""
    missing = scores.shape[-1] - mask.shape[-1]
    fill = False if mask.dtype == bool else -np.inf
    mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=fill) if missing else mask
    return jnp.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask


# ---- losses of class indices -----------------------------------------------------------------------------------------


@operators.define("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(scores, labels, weights=None, *, ignore_index=None, reduction):
    log_prob = jax.nn.log_softmax(scores, 1)
    return _of_classes(log_prob, labels, weights, ignore_index, reduction), log_prob


@operators.define("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(log_prob, labels, weights=None, *, ignore_index=None, reduction):
    return _of_classes(log_prob, labels, weights, ignore_index, reduction)


def _of_classes(log_prob, labels, weights, ignore_index, reduction):
    counted = None if ignore_index is None else labels != ignore_index
    classes = labels if counted is None else jnp.where(counted, labels, 0)
    losses = -_choose_class(log_prob, short(classes, log_prob.shape[1]))
    weight = None if weights is None else jnp.take(weights, wrap_indices(classes, len(weights)), mode="clip")
    if counted is not None:
        weight = jnp.where(counted, 1 if weight is None else weight, 0).astype(losses.dtype)
    losses = losses if weight is None else losses * weight
    if reduction == "none":
        return losses
    if reduction == "sum":
        return jnp.sum(losses)
    return jnp.mean(losses) if weight is None else jnp.sum(losses) / jnp.sum(weight)


@jax.custom_jvp
def _choose_class(log_prob, classes):
    """Return the element at the class index."""
    return jnp.take_along_axis(log_prob, classes[:, None], 1)[:, 0]


@_choose_class.defjvp
def _choose_class_tangent(inputs, tangents):
    # A comparison fuses with its neighbors; the gradient of an index would go through memory.
    log_prob, classes = inputs
    every = jnp.arange(log_prob.shape[1], dtype=classes.dtype).reshape(-1, *[1] * (log_prob.ndim - 2))
    change = jnp.sum(jnp.where(classes[:, None] == every, tangents[0], 0), 1)
    return _choose_class(log_prob, classes), change


# ---- random numbers of JAX; training models have Onward's own generator ----------------------------------------------


def _key(seed):
    return jax.random.key(secrets.randbits(32) if seed is None else int(np.float32(seed).view(np.uint32)))


@operators.define("Dropout")
def dropout(x, ratio=None, training_mode=None, *, seed=None):
    rate = 0.5 if ratio is None else ratio.item()
    if training_mode is None or not training_mode.item() or rate == 0:
        return x, jnp.ones(x.shape, bool)
    mask = jax.random.bernoulli(_key(seed), 1 - rate, x.shape)
    return jnp.where(mask, x / (1 - rate), 0).astype(x.dtype), mask


@operators.define("Bernoulli")
def bernoulli(x, *, dtype=None, seed=None):
    return jax.random.bernoulli(_key(seed), x).astype(x.dtype if dtype is None else dtype_of(dtype))


@operators.define("Multinomial")
def multinomial(x, *, dtype, sample_size, seed=None):
    draws = jax.random.categorical(_key(seed), x[:, None], shape=(len(x), sample_size))
    return draws.astype(dtype_of(dtype))


def _normal(shape, dtype, seed, mean, scale):
    return (mean + scale * jax.random.normal(_key(seed), shape, np.float32)).astype(dtype)


def _uniform(shape, dtype, seed, low, high):
    return jax.random.uniform(_key(seed), shape, np.float32, low, high).astype(dtype)


def _like(x, dtype):
    return x.dtype if dtype is None else dtype_of(dtype)


operators(
    RandomNormal=lambda *, dtype, mean, scale, seed=None, shape: _normal(shape, dtype_of(dtype), seed, mean, scale),
    RandomNormalLike=lambda x, *, dtype=None, mean, scale, seed=None: _normal(
        x.shape, _like(x, dtype), seed, mean, scale
    ),
    RandomUniform=lambda *, dtype, high, low, seed=None, shape: _uniform(shape, dtype_of(dtype), seed, low, high),
    RandomUniformLike=lambda x, *, dtype=None, high, low, seed=None: _uniform(
        x.shape, _like(x, dtype), seed, low, high
    ),
)
