"""Attention of queries, keys and values, perhaps with a mask; all else is expressed by its definition."""

from __future__ import annotations

import contextvars
import math

import jax
import jax.numpy as jnp
import numpy as np

from onward.engines.framework import Operators
from onward.engines.jax.activation import softmax

operators = Operators()


@operators.define("Attention")
def attention(q, k, v, mask=None, *, is_causal, kv_num_heads=None, q_num_heads=None, scale=None, fused=False):
    """`fused` allows for cuDNN's, which computes in few bits."""
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
    if mask is not None:  # a query that sees no key gets zeros
        weights = jnp.where(jnp.max(scores, -1, keepdims=True) == -np.inf, 0, weights)
    y = jnp.einsum("bhqk,bhkd->bhqd", weights, v)
    return y.swapaxes(1, 2).reshape(len(y), y.shape[2], -1) if packed else y


derivatives: contextvars.ContextVar[int] = contextvars.ContextVar("derivatives", default=0)
"""How many derivatives there will be: fused attention has only one."""


def _has_kernel(q, k, v):
    sizes = {x.shape[-1] for x in (q, k, v)}
    half = all(x.dtype in (jnp.bfloat16, jnp.float16) for x in (q, k, v))
    return half and len(sizes) == 1 and max(sizes) <= 128 and max(sizes) % 8 == 0 and derivatives.get() < 2


def _fused_attention(q, k, v, is_causal, scale):
    """(batch, heads, length, size) -> (batch, length, heads, size)."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=bool(is_causal), implementation="cudnn")


def _heads(x, count):
    """(batch, length, heads * size) -> (batch, heads, length, size)."""
    return x.reshape(*x.shape[:2], count, -1).swapaxes(1, 2)


def _apply_mask(scores, mask):
    """What is behind the end of a mask is not seen."""
    missing = scores.shape[-1] - mask.shape[-1]
    fill = False if mask.dtype == bool else -np.inf
    mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=fill) if missing else mask
    return jnp.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
