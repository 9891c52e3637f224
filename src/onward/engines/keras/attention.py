"""Attention of queries, keys and values, perhaps with a mask; all else is expressed by its definition."""

from __future__ import annotations

import math

import numpy as np
from keras import ops

from onward.engines.framework import Operators
from onward.engines.keras.values import dtype_of

operators = Operators()


@operators.define("Attention")
def attention(q, k, v, mask=None, *, is_causal=0, kv_num_heads=None, q_num_heads=None, scale=None):
    packed = len(q.shape) == 3
    if packed:
        q, k, v = heads(q, q_num_heads), heads(k, kv_num_heads), heads(v, kv_num_heads)
    if q.shape[1] != k.shape[1]:
        k, v = (ops.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    root = math.sqrt(1 / math.sqrt(q.shape[3]) if scale is None else scale)
    scores = ops.matmul(q * root, ops.swapaxes(k * root, 2, 3))
    if mask is not None:
        scores = apply_mask(scores, mask)
    if is_causal:
        keys, queries = (ops.arange(ops.shape(x)[2], dtype="int32") for x in (k, q))
        scores = ops.where(keys <= queries[:, None], scores, -np.inf)
    weights = ops.softmax(scores, -1)
    if mask is not None:  # a query that sees no key gets zeros
        empty = ops.max(scores, -1, keepdims=True) == -np.inf
        some = ops.softmax(ops.where(empty, ops.zeros_like(scores), scores), -1)
        weights = ops.where(empty, ops.zeros_like(weights), some)
    y = ops.matmul(weights, v)
    if packed:
        y = ops.swapaxes(y, 1, 2)
        y = ops.reshape(y, (-1, ops.shape(y)[1], y.shape[2] * y.shape[3]))
    return y


def heads(x, count):
    """(batch, length, heads * size) -> (batch, heads, length, size)."""
    return ops.swapaxes(ops.reshape(x, (-1, ops.shape(x)[1], count, x.shape[2] // count)), 1, 2)


def apply_mask(scores, mask):
    """What is behind the end of a mask is not seen."""
    is_bool, missing = dtype_of(mask) == "bool", (scores.shape[-1] or 0) - (mask.shape[-1] or 0)
    if missing > 0:
        around = [(0, 0)] * (len(mask.shape) - 1) + [(0, missing)]
        mask = ops.pad(mask, around, constant_values=False if is_bool else -np.inf)
    return ops.where(mask, scores, -np.inf) if is_bool else scores + mask
