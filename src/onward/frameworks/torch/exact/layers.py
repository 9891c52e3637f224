"""Layers that PyTorch has no class for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


def population_batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    bias: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """Batch normalization that keeps the variance of batches as it is; PyTorch's own divides by n - 1 for it."""
    if not training:
        return F.batch_norm(x, mean, variance, weight, bias, False, momentum, eps)
    with torch.no_grad():
        new_variance, new_mean = torch.var_mean(x, (0, *range(2, x.ndim)), correction=0)
        variance.mul_(1 - momentum).add_(new_variance, alpha=momentum)
        mean.mul_(1 - momentum).add_(new_mean, alpha=momentum)
    return F.batch_norm(x, None, None, weight, bias, True, momentum, eps)


class PopulationBatchNorm(_BatchNorm):  # type: ignore[misc]
    """Batch normalization, of tensors with any number of axes, by `population_batch_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        return population_batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum, self.eps)
