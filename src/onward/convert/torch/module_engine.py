"""PyTorch as an engine inside of a module: gradients are the module's affair, and statistics are its buffers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from onward.engines.torch import Torch
from onward.engines.torch.normalization import batch_normalization
from onward.options import Variance


class Live(Torch):
    """PyTorch with gradients left on, and with statistics that are buffers of a module."""

    def __init__(self, device: torch.device, statistics: Variance):
        super().__init__(str(device))
        self.operators["BatchNormalization"] = functools.partial(_batch_normalization, statistics)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        yield


def _batch_normalization(
    statistics: Variance,
    x: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    *,
    training_mode: int,
    momentum: float,
    epsilon: float,
    outputs: int,
) -> Any:
    """In training the running statistics change in place, as those of PyTorch's own layer do."""
    share = share_of_batch(momentum)
    if training_mode and statistics == "sample":
        return F.batch_norm(x, mean, variance, scale, bias, True, share, epsilon)
    if training_mode:
        with torch.no_grad():
            of_batch = torch.var_mean(x, (0, *range(2, x.ndim)), correction=0)
            for old, new in zip((variance, mean), of_batch, strict=True):
                old.mul_(1 - share).add_(new, alpha=share)
    return batch_normalization(
        x, scale, bias, mean, variance, epsilon=epsilon, momentum=momentum, training_mode=training_mode, outputs=1
    )


def share_of_batch(momentum: float) -> float:
    """What PyTorch calls the momentum of its layers: 0.1, not 0.10000002."""
    return round(1 - float(str(np.float32(momentum))), 9)
