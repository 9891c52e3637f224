"""Attention."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.engines.framework import Operators
from onward.engines.numpy.activation import softmax
from onward.engines.numpy.matrix import matmul
from onward.engines.numpy.precision import in_float32, widened

operators = Operators()


@operators.define("Attention")
def attention(
    q, k, v, mask=None, past_key=None, past_value=None, lengths=None, *,
    is_causal, kv_num_heads, left_window_size, q_num_heads, qk_matmul_output_mode, right_window_size, scale, softcap,
    softmax_precision,
):  # fmt: skip
    packed = q.ndim == 3
    if packed:
        q, k, v = _heads(q, q_num_heads), _heads(k, kv_num_heads), _heads(v, kv_num_heads)
    offset = 0 if lengths is None else (lengths - q.shape[2]).reshape(-1, 1, 1, 1)
    if past_key is not None:
        offset = past_key.shape[2]
        k, v = np.concatenate([past_key, k], 2), np.concatenate([past_value, v], 2)
    bias = _bias(q, k, mask, lengths, offset, left_window_size, 0 if is_causal else right_window_size)
    present = k, v
    k, v = (x.repeat(q.shape[1] // x.shape[1], 1) for x in (k, v))

    root = q.dtype.type(np.sqrt(1 / np.sqrt(q.shape[3]) if scale is None else scale))
    cap = q.dtype.type(softcap)
    raw = matmul(q * root, (k * root).swapaxes(2, 3))
    capped = np.tanh(raw / cap) * cap if softcap else raw
    biased = capped + bias
    logits = biased if softmax_precision is None else biased.astype(ir.DataType(softmax_precision).numpy())
    masked = np.isneginf(bias.max(-1, keepdims=True))  # a query that sees no key has no result
    weights = np.where(masked, logits.dtype.type(0), softmax(logits, axis=-1)).astype(q.dtype)
    y = matmul(weights, v)
    return _packed(y) if packed else y, *present, (raw, capped, biased, weights)[qk_matmul_output_mode]


def _heads(x, count):
    """[N, length, heads * size] as [N, heads, length, size]."""
    return x.reshape(*x.shape[:2], count, -1).swapaxes(1, 2)


def _packed(x):
    """The reverse."""
    n, heads, length, size = x.shape
    return x.swapaxes(1, 2).reshape(n, length, heads * size)


def _bias(q, k, mask, lengths, offset, left, right):
    """What is added to the scores: the mask, and minus infinity where a query does not see a key."""
    keys = np.arange(k.shape[2])
    distance = keys - (np.arange(q.shape[2])[:, None] + offset)
    seen = np.ones_like(distance, bool)
    if left >= 0:
        seen = seen & (distance >= -left)
    if right >= 0:
        seen = seen & (distance <= right)
    if lengths is not None:
        seen = seen & (keys < lengths.reshape(-1, 1, 1, 1))
    bias = np.where(seen, 0, -np.inf)
    if mask is None:
        return bias.astype(q.dtype)
    mask = np.where(mask, 0, -np.inf) if mask.dtype == np.bool_ else widened(mask)
    missing = k.shape[2] - mask.shape[-1]  # keys at the end that a mask may leave out
    mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=-np.inf)
    return (bias + mask).astype(q.dtype)


@operators.define("LinearAttention")
def linear_attention(q, k, v, state=None, decay=None, beta=None, *, kv_num_heads, q_num_heads, scale, update_rule):
    queries, keys, values = (
        _heads(widened(x), count) for x, count in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))
    )
    n, _, length, size = keys.shape
    kind = q.dtype if state is None else state.dtype
    s = np.zeros((n, kv_num_heads, size, values.shape[3]), keys.dtype) if state is None else widened(state)
    gates = None if decay is None else np.exp(_heads(widened(decay), kv_num_heads))[..., None]
    rates = None if beta is None else widened(beta).swapaxes(1, 2)[..., None, None]
    results = []
    for t in range(length):
        key, value, query = (x[:, :, t, :, None] for x in (keys, values, queries))
        if "gated" in update_rule:
            s = s * gates[:, :, t]
        if "delta" in update_rule:
            value = rates[:, :, t] * (value - s.swapaxes(2, 3) @ key)
        s = s + key * value.swapaxes(2, 3)
        shared = s.repeat(q_num_heads // kv_num_heads, 1)
        results.append(((scale or 1 / np.sqrt(size)) * (shared.swapaxes(2, 3) @ query))[..., 0])
    y = np.stack(results, 1).reshape(n, length, -1)
    return y.astype(q.dtype), s.astype(kind)


@operators.define("RotaryEmbedding")
@in_float32
def rotary_embedding(x, cos, sin, positions=None, *, interleaved, num_heads, rotary_embedding_dim):
    heads = _heads(x, num_heads) if x.ndim == 3 else x  # [N, heads, length, size]
    size = rotary_embedding_dim or heads.shape[3]
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = heads[..., :size], heads[..., size:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else np.split(turned, 2, -1)
    parts = [a * cos - b * sin, a * sin + b * cos]
    turned = np.stack(parts, -1).reshape(turned.shape) if interleaved else np.concatenate(parts, -1)
    y = np.concatenate([turned, rest], -1)
    return _packed(y) if x.ndim == 3 else y
