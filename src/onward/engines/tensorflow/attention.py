"""Attention, and positions as rotations."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from onward.engines.framework import Operators
from onward.engines.tensorflow.tensors import dtype_of, scalar, sizes, wide

operators = Operators()


@operators.define("Attention")
def attention(
    q, k, v, mask=None, past_key=None, past_value=None, lengths=None,
    *, is_causal, kv_num_heads, left_window_size, q_num_heads, qk_matmul_output_mode, right_window_size, scale,
    softcap, softmax_precision,
):  # fmt: skip
    """softmax(cap(scale q k') + bias) v for each head; a query that may see no key gets 0."""
    flat = q.shape.rank == 3
    if flat:
        q, k, v = _split(q, q_num_heads), _split(k, kv_num_heads), _split(v, kv_num_heads)
    if past_key is not None:
        k, v = tf.concat([past_key, k], 2), tf.concat([past_value, v], 2)
    past = 0 if past_key is None else past_key.shape[2]
    visible = _visible(q, k, past, lengths, 0 if is_causal else right_window_size, left_window_size)

    root = math.sqrt(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    products = tf.matmul(wide(q) * root, wide(_repeated(k, q)) * root, transpose_b=True)
    capped = softcap * tf.tanh(products / softcap) if softcap else products
    scores = _masked(capped, mask, visible)
    weights = _softmax(scores, softmax_precision, mask is not None or tf.is_tensor(visible) or _hides_all(visible))
    weights = tf.cast(weights, q.dtype)
    y = tf.cast(tf.matmul(wide(weights), wide(_repeated(v, q))), q.dtype)
    if flat:
        y = tf.reshape(tf.transpose(y, [0, 2, 1, 3]), [q.shape[0], q.shape[2], -1])
    return y, k, v, tf.cast((products, capped, scores, weights)[qk_matmul_output_mode], q.dtype)


def _split(x, heads):
    """[batch, length, heads * width] as [batch, heads, length, width]."""
    batch, length, width = sizes(x)
    return tf.transpose(tf.reshape(x, [batch, length, heads, width // heads]), [0, 2, 1, 3])


def _repeated(x, q):
    """Keys or values for as many heads as there are of queries."""
    times = q.shape[1] // x.shape[1]
    return x if times == 1 else tf.repeat(x, times, 1)


def _visible(q, k, past, lengths, ahead, behind):
    """Where a query sees a key: known as an array, unless there are `lengths`; None for everywhere."""
    keys, queries = np.arange(k.shape[2]), np.arange(q.shape[2])[:, None]
    place = queries + past
    if lengths is not None:
        lengths = lengths[:, None, None, None]
        place = queries + (past or lengths - q.shape[2])
    conditions = []
    if ahead >= 0:
        conditions.append(keys <= place + ahead)
    if behind >= 0:
        conditions.append(keys >= place - behind)
    if lengths is not None:
        conditions.append(keys < lengths)
    visible = None
    for condition in conditions:
        visible = condition if visible is None else visible & condition
    return visible


def _hides_all(visible):
    """Whether there is a query that sees no key."""
    return visible is not None and not visible.any(-1).all()


def _masked(scores, mask, visible):
    unseen = scalar(-math.inf, scores)
    if mask is not None:
        missing = [(0, 0)] * (mask.shape.rank - 1) + [(0, scores.shape[-1] - mask.shape[-1])]
        if mask.dtype == tf.bool:
            scores = tf.where(tf.pad(mask, missing), scores, unseen)
        else:
            scores += tf.pad(tf.cast(mask, scores.dtype), missing, constant_values=unseen)
    return scores if visible is None else tf.where(visible, scores, unseen)


def _softmax(scores, precision, may_be_blind):
    scores = scores if precision is None else tf.cast(scores, dtype_of(precision))
    if not may_be_blind:
        return tf.nn.softmax(scores)
    blind = tf.reduce_max(scores, -1, keepdims=True) == -math.inf
    return tf.where(blind, scalar(0, scores), tf.nn.softmax(tf.where(blind, scalar(0, scores), scores)))


@operators.define("RotaryEmbedding")
def rotary_embedding(x, cos, sin, positions=None, *, interleaved, num_heads, rotary_embedding_dim):
    """Pairs of numbers are turned by an angle: [batch, position, head, width]."""
    rows = tf.transpose(x, [0, 2, 1, 3]) if x.shape.rank == 4 else tf.reshape(x, [*x.shape[:2], num_heads, -1])
    width = rotary_embedding_dim or rows.shape[-1]
    turned, rest = rows[..., :width], rows[..., width:]
    if positions is not None:
        cos, sin = tf.gather(cos, positions), tf.gather(sin, positions)
    cos, sin = cos[:, :, None], sin[:, :, None]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else tf.split(turned, 2, -1)
    pair = [a * cos - b * sin, a * sin + b * cos]
    turned = tf.reshape(tf.stack(pair, -1), turned.shape) if interleaved else tf.concat(pair, -1)
    y = tf.concat([turned, rest], -1)
    return tf.transpose(y, [0, 2, 1, 3]) if x.shape.rank == 4 else tf.reshape(y, x.shape)
