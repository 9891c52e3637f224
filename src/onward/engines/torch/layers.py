"""Normalization, attention, losses, and random numbers of PyTorch (prepared models draw their own)."""

from __future__ import annotations

import struct

import torch
from torch.nn import functional as F

from onward.engines.framework import Operators
from onward.engines.shared.arrays import per_channel
from onward.engines.torch.types import CODES, TYPES

operators = Operators()


@operators.define("BatchNormalization")
def batch_normalization(x, scale, bias, mean, variance, *, epsilon, momentum, training_mode, outputs):
    if not training_mode and (mean.requires_grad or variance.requires_grad):  # `F.batch_norm` has no such derivative
        mean, factor, bias = (per_channel(v, x) for v in (mean, scale * (variance + epsilon).rsqrt(), bias))
        return (x - mean) * factor + bias
    if not training_mode:
        return F.batch_norm(x, mean, variance, scale, bias, False, 0, epsilon)
    y = F.batch_norm(x, None, None, scale, bias, True, 0, epsilon)
    if outputs == 1:
        return y
    of_batch = torch.var_mean(x, (0, *range(2, x.ndim)), correction=0, keepdim=True)  # batch_norm computes it, too
    new_variance, new_mean = (
        old * momentum + new.flatten() * (1 - momentum) for old, new in zip((variance, mean), of_batch, strict=True)
    )
    return y, new_mean, new_variance


def batch_normalization_at_once(x, scale, bias, mean, variance, *, epsilon, momentum, training_mode, outputs):
    """Return the result and the statistics of one call of PyTorch. The statistics have no derivative."""
    if not training_mode or outputs == 1:
        return batch_normalization(
            x, scale, bias, mean, variance,
            epsilon=epsilon, momentum=momentum, training_mode=training_mode, outputs=outputs,
        )  # fmt: skip
    of_batch = torch.zeros_like(mean), torch.zeros_like(variance)
    y = F.batch_norm(x, *of_batch, scale, bias, True, 1, epsilon)
    count = x.numel() // x.shape[1]
    new_mean, new_variance = of_batch[0], of_batch[1] * ((count - 1) / count)  # PyTorch divides by count - 1
    if momentum == 0:
        return y, new_mean, new_variance
    return y, mean * momentum + new_mean * (1 - momentum), variance * momentum + new_variance * (1 - momentum)


@operators.define("LayerNormalization")
def layer_normalization(x, scale, bias=None, *, axis, epsilon, stash_type, outputs):
    shape = x.shape[axis:]
    fits = scale.shape == shape and (bias is None or bias.shape == shape)
    y = F.layer_norm(x, shape, scale if fits else None, bias if fits else None, epsilon)
    if not fits:
        y = y * scale if bias is None else y * scale + bias
    if outputs == 1:
        return y
    axes = tuple(range(axis % x.ndim, x.ndim))
    variance, mean = torch.var_mean(x.float() if stash_type == 1 else x, axes, correction=0, keepdim=True)
    return y, mean, torch.rsqrt(variance + epsilon)


@operators.define("RMSNormalization")
def rms_normalization(x, scale, *, axis, epsilon):
    shape = x.shape[axis:]
    if scale.shape == shape:
        return F.rms_norm(x, shape, scale, epsilon)
    return F.rms_norm(x, shape, None, epsilon) * scale


operators(
    GroupNormalization=lambda x, scale, bias, *, epsilon, num_groups: F.group_norm(x, num_groups, scale, bias, epsilon),
    InstanceNormalization=lambda x, scale, bias, *, epsilon: F.instance_norm(
        x, weight=scale, bias=bias, eps=epsilon, use_input_stats=True
    ),
)


# ---- attention -------------------------------------------------------------------------------------------------------


@operators.define("Attention")
def attention(q, k, v, mask=None, *, is_causal, kv_num_heads, q_num_heads, scale):
    flat = q.ndim == 3
    if flat:  # the last axis is [heads, size]
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
    """Return the bias of the scores: -inf where a query does not attend to a key."""
    bias = q.new_zeros(()).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask.to(q.dtype)
    if bias.shape[-1] not in (1, k.shape[2]):
        bias = F.pad(bias, (0, k.shape[2] - bias.shape[-1]), value=-torch.inf)
    if not is_causal:
        return bias
    keys, queries = torch.arange(k.shape[2], device=q.device), torch.arange(q.shape[2], device=q.device)
    return torch.where(keys <= queries[:, None], bias, -torch.inf)


# ---- losses of class indices -----------------------------------------------------------------------------------------


@operators.define("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(x, labels, weights=None, *, ignore_index, reduction, outputs):
    log_prob = torch.log_softmax(x, 1)
    loss = nll_loss(log_prob, labels, weights, ignore_index=ignore_index, reduction=reduction)
    return (loss, log_prob) if outputs > 1 else loss


@operators.define("NegativeLogLikelihoodLoss")
def nll_loss(x, labels, weights=None, *, ignore_index, reduction):
    ignored = -100 if ignore_index is None else ignore_index
    return F.nll_loss(x, labels.long(), weights, ignore_index=ignored, reduction=reduction)


# ---- random numbers --------------------------------------------------------------------------------------------------


def generator(seed, device):
    """Return a generator for a seed. None stands for the default generator of PyTorch."""
    if seed is None:
        return None
    bits = struct.unpack("<q", struct.pack("<d", seed))[0]  # `int(seed)` would merge different floats
    return torch.Generator(device).manual_seed(bits)


@operators.define("Dropout")
def dropout(x, ratio=None, training_mode=None, *, seed, outputs):
    ratio = 0.5 if ratio is None else float(ratio)
    if training_mode is None or not training_mode:
        return x, torch.ones_like(x, dtype=torch.bool)
    if outputs == 1 and seed is None:
        return F.dropout(x, ratio)
    mask = torch.rand(x.shape, generator=generator(seed, x.device), device=x.device) >= ratio
    return torch.where(mask, x / (1 - ratio), 0), mask


@operators.define("Bernoulli")
def bernoulli(x, *, dtype, seed):
    draws = torch.rand(x.shape, generator=generator(seed, x.device), device=x.device, dtype=x.dtype) < x
    return draws.to(x.dtype if dtype is None else TYPES[dtype])


@operators.define("Multinomial")
def multinomial(x, *, dtype, sample_size, seed):
    draws = torch.multinomial(x.softmax(1), sample_size, replacement=True, generator=generator(seed, x.device))
    return draws.to(TYPES[dtype])


def _normal(mean, scale, shape, dtype, seed, device):
    return torch.randn(shape, generator=generator(seed, device), device=device, dtype=TYPES[dtype]) * scale + mean


def _uniform(low, high, shape, dtype, seed, device):
    draws = torch.rand(shape, generator=generator(seed, device), device=device, dtype=TYPES[dtype])
    return draws * (high - low) + low


def _like(x, dtype, seed):
    return x.shape, CODES[x.dtype] if dtype is None else dtype, seed, x.device


operators(
    RandomNormal=lambda *, dtype, mean, scale, seed, shape, device="cpu": _normal(
        mean, scale, shape, dtype, seed, device
    ),
    RandomNormalLike=lambda x, *, dtype, mean, scale, seed: _normal(mean, scale, *_like(x, dtype, seed)),
    RandomUniform=lambda *, dtype, high, low, seed, shape, device="cpu": _uniform(
        low, high, shape, dtype, seed, device
    ),
    RandomUniformLike=lambda x, *, dtype, high, low, seed: _uniform(low, high, *_like(x, dtype, seed)),
)
