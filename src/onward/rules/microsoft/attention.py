"""Attention operators of ONNX Runtime, with projections, masks and key-value caches."""

import numpy as np

from onward.rules.common import largest, rank
from onward.rules.microsoft.domain import as_length, count_up_to, refuse, rewrite
from onward.rules.normalization import rotated_halves

_END = [2**31 - 1]


@rewrite("Attention")
def attention(
    op, x, weights, bias, mask, past, scores_bias, past_length, *, num_heads, qkv_hidden_sizes=None, scale=0.0,
    mask_filter_value=-10000.0, unidirectional=0, do_rotary=0, past_present_share_buffer=0, node,
):  # fmt: skip
    """Return self-attention with the projections to queries, keys and values."""
    if do_rotary or past_present_share_buffer:
        refuse(node, "do_rotary" if do_rotary else "a buffer that past and present share")
    projected = op.MatMul(x, weights)
    projected = projected if bias is None else projected + bias
    if qkv_hidden_sizes:
        q, k, v = op.Split(projected, qkv_hidden_sizes, outputs=3, axis=-1)
    else:
        q, k, v = op.Split(projected, outputs=3, axis=-1, num_outputs=3)
    q, k, v = (_by_head(op, x, num_heads) for x in (q, k, v))
    if past is not None:
        k, v = (op.Concat(op.Gather(past, np.int64(i), axis=0), new, axis=2) for i, new in enumerate((k, v)))
    before = None if past is None else op.Shape(past, start=3, end=4)
    hidden = _mask_bias(op, q, k, mask, mask_filter_value, before, unidirectional)
    y, _ = _attend(op, q, k, v, scale, _sum_present(hidden, scores_bias))
    return y, op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0)


@rewrite("MultiHeadAttention")
def multi_head_attention(
    op, query, key, value, bias, mask, scores_bias, past_key, past_value, past_length, beams, *, num_heads, scale=0.0,
    mask_filter_value=-10000.0, unidirectional=0, node,
):  # fmt: skip
    """Return attention of queries, keys and values, which may be packed, plus the bias of their projections."""
    if past_length is not None or beams is not None:
        refuse(node, "a buffer that past and present share")
    by_head = key is not None and rank(key) == 4  # keys and values from earlier
    if key is None:
        query, key, value = _unpack(op, query, 3)
    elif value is None:
        key, value = _unpack(op, key, 2)
    if bias is not None:
        query, key, value = _with_bias(op, query, key, value, bias, only_query=by_head)
    q = _by_head(op, query, num_heads)
    k, v = (key, value) if by_head else (_by_head(op, x, num_heads) for x in (key, value))
    before = None
    if past_key is not None:
        before = op.Shape(past_key, start=2, end=3)
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    hidden = _mask_bias(op, q, k, mask, mask_filter_value, before, unidirectional)
    y, scores = _attend(op, q, k, v, scale, _sum_present(hidden, scores_bias))
    return y, k, v, scores


@rewrite("GroupQueryAttention")
def group_query_attention(
    op, query, key, value, past_key, past_value, last, total, cos, sin, positions, scores_bias, sink, k_scale, v_scale,
    q_norm, k_norm, *, num_heads, kv_num_heads, scale=0.0, softcap=0.0, local_window_size=-1, do_rotary=0,
    rotary_interleaved=0, smooth_softmax=0, causal=1, sliding_window_cache=0, node,
):  # fmt: skip
    """Return attention with keys and values for groups of heads; `last` is the index of each sequence's last key."""
    if k_scale is not None or v_scale is not None or sliding_window_cache:
        refuse(node, "a sliding cache" if sliding_window_cache else "a quantized cache")
    if q_norm is not None or k_norm is not None:
        refuse(node, "normalized queries and keys")
    if len(node.outputs) > 3 and (node.outputs[3].uses() or node.outputs[3].is_graph_output()):
        refuse(node, "scores as an output")
    if key is None:
        packed = _by_head(op, query, num_heads + 2 * kv_num_heads)
        q, k, v = op.Split(packed, [num_heads, kv_num_heads, kv_num_heads], outputs=3, axis=1)
    else:
        q, k, v = _by_head(op, query, num_heads), _by_head(op, key, kv_num_heads), _by_head(op, value, kv_num_heads)
    length = op.Shape(q, start=2, end=3)
    total = op.Reshape(as_length(op, total), [1])
    count = op.Reshape(as_length(op, last) + 1, [-1, 1])  # of keys in each sequence
    is_prompt = op.Equal(length, total)
    before = op.Where(is_prompt, np.int64(0), count - length)
    if do_rotary:
        steps = count_up_to(op, length)
        if positions is None:
            positions = before + steps
        else:  # in a prompt, the operator reads only the first position
            positions = op.Where(is_prompt, op.Slice(positions, [0, 0], [1, 1]) + steps, positions)
        cosines, sines = (op.Unsqueeze(op.Gather(cache, positions, axis=0), [1]) for cache in (cos, sin))
        q, k = (_rotate(op, x, cosines, sines, rotary_interleaved, partial=True) for x in (q, k))
    keys, values = k, v
    if past_key is not None:
        keys, values = (_insert_new(op, past, new, before, total) for past, new in ((past_key, k), (past_value, v)))
    k, v = (_repeat_heads(op, op.Slice(x, [0], total, [2]), num_heads, kv_num_heads) for x in (keys, values))

    scores = _scale_queries(op, q, scale) @ op.Transpose(k, perm=[0, 1, 3, 2])
    scores = op.Tanh(scores / softcap) * softcap if softcap else scores
    scores = scores if scores_bias is None else scores + scores_bias
    end = op.Unsqueeze(count, [1])  # [sequence, query, key]
    if causal:
        end = op.Min(op.Unsqueeze(before + count_up_to(op, length) + 1, [2]), end)
    position = count_up_to(op, total)
    visible = position < end
    if local_window_size >= 0:
        visible = op.And(visible, position >= end - local_window_size)
    scores = op.Where(op.Unsqueeze(visible, [1]), scores, -largest(scores))
    y = _side_by_side(op, _with_sink(op, scores, sink, smooth_softmax) @ v)
    return y, keys, values


@rewrite("RotaryEmbedding")
def rotary_embedding(
    op, x, positions, cos, sin, *, interleaved=0, num_heads=0, rotary_embedding_dim=0, is_packed_batching=0, node,
):  # fmt: skip
    """Rotate pairs of numbers by an angle per position; a single position is that of the first token."""
    if is_packed_batching or rank(x) is None or rank(positions) is None:
        refuse(node, "packed batches" if is_packed_batching else "inputs of unknown rank")
    flat = rank(x) == 3
    if flat:
        width = [-1] if num_heads else op.Shape(cos, start=1) * 2
        x = op.Reshape(x, op.Concat([0, 0, num_heads or -1], width, axis=0))
        x = op.Transpose(x, perm=[0, 2, 1, 3])
    if rank(positions) == 1:
        positions = op.Unsqueeze(positions + count_up_to(op, op.Shape(x, start=2, end=3)), [0])
    cosines, sines = (op.Unsqueeze(op.Gather(cache, positions, axis=0), [1]) for cache in (cos, sin))
    y = _rotate(op, x, cosines, sines, interleaved, partial=rotary_embedding_dim > 0)
    return _side_by_side(op, y) if flat else y


# ---- heads -----------------------------------------------------------------------------------------------------------


def _by_head(op, x, heads):
    """Reshape (batch, length, heads * width) to (batch, heads, length, width)."""
    return op.Transpose(op.Reshape(x, [0, 0, heads, -1]), perm=[0, 2, 1, 3])


def _side_by_side(op, x):
    """Reshape (batch, heads, length, width) to (batch, length, heads * width)."""
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), [0, 0, -1])


def _repeat_heads(op, x, heads, groups):
    """Repeat keys or values of each group of heads for its heads."""
    if heads == groups:
        return x
    wide = op.Expand(op.Unsqueeze(x, [2]), [1, 1, heads // groups, 1, 1])
    return op.Reshape(wide, op.Concat(op.Shape(x, end=1), [heads], op.Shape(x, start=2), axis=0))


def _unpack(op, packed, count):
    """Split (batch, length, heads, count, width) into `count` times (batch, length, heads * width)."""
    return [op.Reshape(x, [0, 0, -1]) for x in op.Split(packed, outputs=count, axis=3, num_outputs=count)]


def _with_bias(op, query, key, value, bias, only_query):
    """Add the bias of the three projections, one vector."""
    first = op.Shape(query, start=-1)
    query = query + op.Slice(bias, [0], first, [0])
    if only_query:
        return query, key, value
    second = first + op.Shape(key, start=-1)
    return query, key + op.Slice(bias, first, second, [0]), value + op.Slice(bias, second, _END, [0])


def _insert_new(op, past, new, before, total):
    """Return earlier keys or values with the new ones from `before` on, in each sequence."""
    old, count = op.Shape(past, start=2, end=3), op.Shape(new, start=2, end=3)
    length = op.Max(old, total)
    padded = op.Pad(past, op.Concat([0] * 6, length - old, [0], axis=0))
    index = count_up_to(op, length) - before
    inside = op.And(index >= 0, index < count)
    source = op.Unsqueeze(op.Min(op.Max(index, 0), count - 1), [1, 3])
    shape = op.Concat(op.Shape(new, end=2), length, op.Shape(new, start=3), axis=0)
    return op.Where(op.Unsqueeze(inside, [1, 3]), op.GatherElements(new, op.Expand(source, shape), axis=2), padded)


# ---- scores ----------------------------------------------------------------------------------------------------------


def _attend(op, q, k, v, scale, bias):
    """Return softmax(scale Q K' + bias) V, with the heads side by side, and the scores in the softmax."""
    scores = _scale_queries(op, q, scale) @ op.Transpose(k, perm=[0, 1, 3, 2])
    scores = scores if bias is None else scores + bias
    return _side_by_side(op, op.Softmax(scores, axis=-1) @ v), scores


def _scale_queries(op, q, scale):
    """Scale queries (default: by the inverse root of their width)."""
    if scale:
        return q * scale
    return q / op.Sqrt(op.CastLike(op.Shape(q, start=-1), q))


def _sum_present(first, second):
    return first if second is None else second if first is None else first + second


def _mask_bias(op, q, k, mask, value, before, causal):
    """Return the bias of the scores that masks padding and, if `causal`, later keys; None without either."""
    length, total = op.Shape(q, start=2, end=3), op.Shape(k, start=2, end=3)
    position = count_up_to(op, total)
    bias = None
    if mask is not None:
        visible = _not_padding(op, mask, op.Shape(q, end=1), length, total, position)
        bias = op.Where(visible, op.scalar(0, q), op.scalar(value, q))
    if not causal:
        return bias
    query = count_up_to(op, length) if before is None else count_up_to(op, length) + before
    return op.Where(position <= op.Unsqueeze(query, [1]), op.scalar(0, q) if bias is None else bias, -largest(q))


def _not_padding(op, mask, batch, length, total, position):
    """Return a boolean mask of the keys [batch, 1, query or 1, key].

    `mask` has the end of each sequence, optionally followed by the beginnings, or 1 for each key to attend to.
    """
    if rank(mask) == 1:
        ends = op.Slice(as_length(op, mask), [0], batch, [0])
        begins = op.Concat(as_length(op, mask), op.Expand([0], batch), axis=0)
        begins = op.Slice(begins, batch, batch * 2, [0])
        by_sequence = [op.Reshape(limits, [-1, 1, 1, 1]) for limits in (begins, ends)]
        return op.And(position >= by_sequence[0], position < by_sequence[1])
    if rank(mask) == 4:
        mask = op.Slice(mask, op.Concat(total - length, [0], axis=0), op.Concat(total, total, axis=0), [2, 3])
    else:
        mask = op.Unsqueeze(mask, [1] if rank(mask) == 3 else [1, 2])
    return mask > 0


def _with_sink(op, scores, sink, smooth):
    """Return the softmax with one more score, whose share is dropped."""
    if sink is None and not smooth:
        return op.Softmax(scores, axis=-1)
    extra = op.scalar(0, scores) if sink is None else op.Reshape(sink, [1, -1, 1, 1])
    extra = op.Expand(extra, op.Concat(op.Shape(scores, end=3), [1], axis=0))
    return op.Slice(op.Softmax(op.Concat(scores, extra, axis=3), axis=-1), [0], [-1], [3])


def _rotate(op, x, cos, sin, interleaved, partial):
    """Rotate halves (A, B) to (A cos - B sin, A sin + B cos); with `partial`, keep the elements behind them."""
    half = op.Shape(cos, start=-1)
    a, b = rotated_halves(op, x, half, interleaved)
    rotated = a * cos - b * sin, a * sin + b * cos
    if interleaved:
        y = op.Reshape(op.Concat(*(op.Unsqueeze(y, [4]) for y in rotated), axis=4), [0, 0, 0, -1])
    else:
        y = op.Concat(*rotated, axis=3)
    return op.Concat(y, op.Slice(x, half * 2, _END, [3]), axis=3) if partial else y
