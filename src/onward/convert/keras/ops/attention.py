"""Attention. What is rotary or linear is expressed by its own definition."""

from __future__ import annotations

import math

import numpy as np
from keras import ops

from onward.convert.keras.ops.types import available, dtype_of
from onward.engines.framework import Operators

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
    is_causal=0,
    kv_num_heads=None,
    left_window_size=-1,
    q_num_heads=None,
    qk_matmul_output_mode=0,
    right_window_size=-1,
    scale=None,
    softcap=0.0,
    softmax_precision=None,
    outputs=1,
):
    packed = len(q.shape) == 3
    if packed:
        q, k, v = heads(q, q_num_heads), heads(k, kv_num_heads), heads(v, kv_num_heads)
    offset = 0 if past_key is None else past_key.shape[2]
    if past_key is not None:
        k, v = ops.concatenate([past_key, k], 2), ops.concatenate([past_value, v], 2)
    present = k, v
    if q.shape[1] != k.shape[1]:
        k, v = (ops.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    root = math.sqrt(1 / math.sqrt(q.shape[3]) if scale is None else scale)
    products = ops.matmul(q * root, ops.swapaxes(k * root, 2, 3))
    capped = softcap * ops.tanh(products / softcap) if softcap else products
    right = 0 if is_causal else right_window_size
    scores = masked(capped, mask, visible(ops.shape(q)[2], ops.shape(k)[2], offset, valid, left_window_size, right))
    exact = scores if softmax_precision is None else ops.cast(scores, available(softmax_precision))
    weights = ops.softmax(exact, -1)
    if mask is not None or valid is not None or left_window_size >= 0:  # a query that sees no key gets zeros
        empty = ops.max(exact, -1, keepdims=True) == -np.inf
        weights = ops.where(
            empty, ops.zeros_like(weights), ops.softmax(ops.where(empty, ops.zeros_like(exact), exact), -1)
        )
    weights = ops.cast(weights, dtype_of(q))
    y = ops.matmul(weights, v)
    if packed:
        y = ops.swapaxes(y, 1, 2)
        y = ops.reshape(y, (-1, ops.shape(y)[1], y.shape[2] * y.shape[3]))
    return (y, *present, (products, capped, scores, weights)[qk_matmul_output_mode])[:outputs]


def heads(x, count):
    """(batch, length, heads * size) -> (batch, heads, length, size)."""
    return ops.swapaxes(ops.reshape(x, (-1, ops.shape(x)[1], count, x.shape[2] // count)), 1, 2)


def visible(queries, keys, offset, valid, left, right):
    """Which keys a query may see: those that are not filled up, in a window around it. None if it is all of them."""
    if valid is None and left < 0 and right < 0:
        return None
    key, place = ops.arange(keys, dtype="int32"), ops.arange(queries, dtype="int32")[:, None] + offset
    seen = None
    if valid is not None:
        valid = ops.reshape(ops.cast(valid, "int32"), (-1, 1, 1, 1))
        place, seen = place + valid - queries, key < valid
    for bound in ([key <= place + right] if right >= 0 else []) + ([key >= place - left] if left >= 0 else []):
        seen = bound if seen is None else ops.logical_and(seen, bound)
    return seen


def masked(scores, mask, seen):
    if mask is not None:
        is_bool, missing = dtype_of(mask) == "bool", (scores.shape[-1] or 0) - (mask.shape[-1] or 0)
        if missing > 0:
            around = [(0, 0)] * (len(mask.shape) - 1) + [(0, missing)]
            mask = ops.pad(mask, around, constant_values=False if is_bool else -np.inf)
        scores = ops.where(mask, scores, -np.inf) if is_bool else scores + mask
    return scores if seen is None else ops.where(seen, scores, -np.inf)
