"""Normalizations."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from onward.engines.framework import Operators
from onward.engines.shared.arrays import per_channel

operators = Operators()


@operators.define("BatchNormalization")
def batch_normalization(x, scale, bias, mean, variance, *, epsilon, momentum, training_mode, outputs):
    if not training_mode and (mean.requires_grad or variance.requires_grad):  # computed, and PyTorch's are not
        mean, factor, bias = (per_channel(part, x) for part in (mean, scale * (variance + epsilon).rsqrt(), bias))
        return (x - mean) * factor + bias
    if not training_mode:
        return F.batch_norm(x, mean, variance, scale, bias, False, 0, epsilon)
    y = F.batch_norm(x, None, None, scale, bias, True, 0, epsilon)
    if outputs == 1:
        return y
    of_batch = torch.var_mean(x, (0, *range(2, x.ndim)), correction=0, keepdim=True)  # as batch_norm has it: shared
    new_variance, new_mean = (
        old * momentum + new.flatten() * (1 - momentum) for old, new in zip((variance, mean), of_batch, strict=True)
    )
    return y, new_mean, new_variance


def batch_normalization_at_once(x, scale, bias, mean, variance, *, epsilon, momentum, training_mode, outputs):
    """The same where nothing is differentiated by way of the statistics: PyTorch has them when it has the result."""
    if not training_mode or outputs == 1:
        return batch_normalization(
            x, scale, bias, mean, variance,
            epsilon=epsilon, momentum=momentum, training_mode=training_mode, outputs=outputs,
        )  # fmt: skip
    of_batch = torch.zeros_like(mean), torch.zeros_like(variance)
    y = F.batch_norm(x, *of_batch, scale, bias, True, 1, epsilon)
    count = x.numel() // x.shape[1]
    new_mean, new_variance = of_batch[0], of_batch[1] * ((count - 1) / count)  # PyTorch divides by one less
    if momentum == 0:
        return y, new_mean, new_variance
    return y, mean * momentum + new_mean * (1 - momentum), variance * momentum + new_variance * (1 - momentum)


@operators.define("LayerNormalization")
def layer_normalization(x, scale, bias=None, *, axis, epsilon, stash_type, outputs):
    shape = x.shape[axis:]
    whole = scale.shape == shape and (bias is None or bias.shape == shape)
    y = F.layer_norm(x, shape, scale if whole else None, bias if whole else None, epsilon)
    if not whole:
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
