"""Attention."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from onward.engines.framework import Operators
from onward.engines.torch.types import TYPES

operators = Operators()


@operators.define("Attention")
def attention(
    q,
    k,
    v,
    mask=None,
    past_key=None,
    past_value=None,
    lengths=None,
    *,
    is_causal,
    kv_num_heads,
    left_window_size=-1,
    q_num_heads,
    qk_matmul_output_mode,
    right_window_size=-1,
    scale,
    softcap,
    softmax_precision,
    outputs,
):
    flat = q.ndim == 3
    if flat:  # the heads lie side by side in the last axis
        heads = (q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads)
        q, k, v = (x.unflatten(2, (count, -1)).transpose(1, 2) for x, count in heads)
    if past_key is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    present = k, v
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    ahead = 0 if is_causal else right_window_size
    plain = softcap == 0 and softmax_precision is None and outputs <= 3 and left_window_size < 0
    if plain and mask is None and past_key is None and lengths is None and (is_causal or ahead < 0):
        y, matrix = F.scaled_dot_product_attention(q, k, v, is_causal=bool(is_causal), scale=scale), None
    else:
        bias = _bias(q, k, mask, _visible(q, k, past_key, lengths, ahead, left_window_size))
        blind = (bias == -torch.inf).all(-1, keepdim=True) if bias is not None else None
        bias = bias if blind is None else torch.where(blind, 0, bias)
        if plain:
            y, matrix = F.scaled_dot_product_attention(q, k, v, bias, scale=scale), None
        else:
            y, matrix = _written_out(q, k, v, bias, blind, scale, softcap, softmax_precision, qk_matmul_output_mode)
        y = y if blind is None else torch.where(blind, 0, y)
    if flat:
        y = y.transpose(1, 2).flatten(2)
    return (y, *present, matrix)[:outputs]


def _written_out(q, k, v, bias, blind, scale, softcap, precision, mode):
    root = q.shape[-1] ** -0.25 if scale is None else scale**0.5
    products = (q * root) @ (k * root).transpose(2, 3)
    capped = torch.tanh(products / softcap) * softcap if softcap else products
    scores = capped if bias is None else capped + bias
    weights = torch.softmax(scores, -1, dtype=None if precision is None else TYPES[precision]).to(q.dtype)
    y = weights @ v.to(q.dtype)
    if blind is not None:
        scores, weights = torch.where(blind, -torch.inf, scores), torch.where(blind, 0, weights)
    return y, (products, capped, scores, weights)[mode]


def _visible(q, k, past_key, lengths, ahead, behind):
    """Where a query sees a key: neither too far ahead of it, nor too far behind, nor padding; None for everywhere."""
    keys = torch.arange(k.shape[2], device=q.device)
    place = torch.arange(q.shape[2], device=q.device)[:, None]
    if past_key is not None:
        place = place + past_key.shape[2]
    elif lengths is not None:
        lengths = lengths.reshape(-1, 1, 1, 1)
        place = place + lengths - q.shape[2]
    conditions = []
    if ahead >= 0:
        conditions.append(keys <= place + ahead)
    if behind >= 0:
        conditions.append(keys >= place - behind)
    if lengths is not None:
        conditions.append(keys < lengths)
    return functools.reduce(torch.logical_and, conditions) if conditions else None


def _bias(q, k, mask, visible):
    """What is added to the scores; -inf where a query does not see a key, or behind the end of a mask."""
    if mask is None:
        return None if visible is None else q.new_zeros(()).masked_fill(~visible, -torch.inf)
    bias = q.new_zeros(()).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask.to(q.dtype)
    if bias.shape[-1] not in (1, k.shape[2]):
        bias = F.pad(bias, (0, k.shape[2] - bias.shape[-1]), value=-torch.inf)
    return bias if visible is None else torch.where(visible, bias, -torch.inf)
