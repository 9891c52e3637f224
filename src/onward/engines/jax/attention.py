"""Attention. What is rotary or linear is expressed by its own definition."""

from __future__ import annotations

import contextvars
import math

import jax
import jax.numpy as jnp
import numpy as np

from onward.engines.framework import Operators
from onward.engines.jax.activation import softmax
from onward.engines.jax.values import dtype_of

operators = Operators()


@operators.define("Attention")
def attention(
    q,
    k,
    v,
    mask=None,
    past_key=None,
    past_value=None,
    valid=None,
    *,
    is_causal,
    kv_num_heads=None,
    left_window_size=-1,
    q_num_heads=None,
    qk_matmul_output_mode,
    right_window_size=-1,
    scale=None,
    softcap,
    softmax_precision=None,
    outputs,
    fused=False,
):
    """`fused` allows for cuDNN's, which computes no more than `y`, in few bits."""
    packed = q.ndim == 3
    if packed:
        q, k, v = _heads(q, q_num_heads), _heads(k, kv_num_heads), _heads(v, kv_num_heads)
    offset = 0 if past_key is None else past_key.shape[2]
    if past_key is not None:
        k, v = jnp.concatenate([past_key, k], 2), jnp.concatenate([past_value, v], 2)
    present = k, v
    if q.shape[1] != k.shape[1]:
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    left, right = left_window_size, 0 if is_causal else right_window_size
    plain = mask is None and past_key is None and valid is None and not softcap and outputs == 1 and left < 0
    if fused and plain and (is_causal or right < 0) and _has_kernel(q, k, v):
        y = _fused(q, k, v, is_causal, scale)
        return (y.reshape(*y.shape[:2], -1) if packed else y.swapaxes(1, 2),)
    root = math.sqrt(1 / math.sqrt(q.shape[3]) if scale is None else scale)
    products = jnp.einsum("bhqd,bhkd->bhqk", q * root, k * root)
    capped = softcap * jnp.tanh(products / softcap) if softcap else products
    allowed = _allowed(q.shape[2], k.shape[2], offset, valid, left, right)
    scores = _masked(capped, mask, allowed)
    exact = scores if softmax_precision is None else scores.astype(dtype_of(softmax_precision))
    may_be_empty = mask is not None or valid is not None or left >= 0
    weights = _softmax(exact, may_be_empty).astype(q.dtype)
    y = jnp.einsum("bhqk,bhkd->bhqd", weights, v)
    y = y.swapaxes(1, 2).reshape(len(y), y.shape[2], -1) if packed else y
    return (y, *present, (products, capped, scores, weights)[qk_matmul_output_mode])[:outputs]


derivatives: contextvars.ContextVar[int] = contextvars.ContextVar("derivatives", default=0)
"""How many derivatives there will be: fused attention has only one."""


def _has_kernel(q, k, v):
    sizes = {x.shape[-1] for x in (q, k, v)}
    half = all(x.dtype in (jnp.bfloat16, jnp.float16) for x in (q, k, v))
    return half and len(sizes) == 1 and max(sizes) <= 128 and max(sizes) % 8 == 0 and derivatives.get() < 2


def _fused(q, k, v, is_causal, scale):
    """(batch, heads, length, size) -> (batch, length, heads, size)."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=bool(is_causal), implementation="cudnn")


def _heads(x, count):
    """(batch, length, heads * size) -> (batch, heads, length, size)."""
    return x.reshape(*x.shape[:2], count, -1).swapaxes(1, 2)


def _allowed(queries, keys, offset, valid, left, right):
    """Which keys a query may see: those that are not filled up, in a window around it. None if it is all of them."""
    if valid is None and left < 0 and right < 0:
        return None
    key, place = np.arange(keys), np.arange(queries)[:, None] + offset
    if valid is not None:
        valid = valid.reshape(-1, 1, 1, 1)
        place = place + valid - queries
    seen = np.array(True) if valid is None else key < valid
    seen = seen & (key <= place + right) if right >= 0 else seen
    return seen & (key >= place - left) if left >= 0 else seen


def _masked(scores, mask, allowed):
    if mask is not None:
        missing = scores.shape[-1] - mask.shape[-1]
        fill = False if mask.dtype == bool else -np.inf
        mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=fill) if missing else mask
        scores = jnp.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    return scores if allowed is None else jnp.where(allowed, scores, -np.inf)


def _softmax(scores, may_be_empty):
    """A query that sees no key gets zeros."""
    weights = softmax(scores, -1)
    return jnp.where(jnp.max(scores, -1, keepdims=True) == -np.inf, 0, weights) if may_be_empty else weights
