"""Attention of queries, keys and values, perhaps with a mask; all else is expressed by its definition."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from onward.engines.framework import Operators

operators = Operators()


@operators.define("Attention")
def attention(q, k, v, mask=None, *, is_causal, kv_num_heads, q_num_heads, scale):
    flat = q.ndim == 3
    if flat:  # the heads lie side by side in the last axis
        heads = (q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads)
        q, k, v = (x.unflatten(2, (count, -1)).transpose(1, 2) for x, count in heads)
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if mask is None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=bool(is_causal), scale=scale)
    else:
        bias = _bias(q, k, mask, is_causal)
        blind = (bias == -torch.inf).all(-1, keepdim=True)
        y = F.scaled_dot_product_attention(q, k, v, torch.where(blind, 0, bias), scale=scale)
        y = torch.where(blind, 0, y)
    return y.transpose(1, 2).flatten(2) if flat else y


def _bias(q, k, mask, is_causal):
    """What is added to the scores; -inf where a query does not see a key, or behind the end of a mask."""
    bias = q.new_zeros(()).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask.to(q.dtype)
    if bias.shape[-1] not in (1, k.shape[2]):
        bias = F.pad(bias, (0, k.shape[2] - bias.shape[-1]), value=-torch.inf)
    if not is_causal:
        return bias
    keys, queries = torch.arange(k.shape[2], device=q.device), torch.arange(q.shape[2], device=q.device)
    return torch.where(keys <= queries[:, None], bias, -torch.inf)
