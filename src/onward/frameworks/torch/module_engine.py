"""PyTorch as an engine inside of a module: gradients are the module's affair, and statistics are its buffers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from onward.engines.shared.arrays import per_channel
from onward.engines.torch import Torch
from onward.engines.torch.layers import batch_normalization
from onward.options import Variance


class Live(Torch):
    """PyTorch with gradients left on, and with statistics that are buffers of a module: those of its own batch, or of
    the batches of all processes."""

    def __init__(self, device: torch.device, statistics: Variance, *, of_all_processes: bool = False):
        super().__init__(str(device))
        normalize = functools.partial(_batch_normalization, statistics, of_all_processes)
        self.operators["BatchNormalization"] = normalize

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        yield


def _batch_normalization(
    statistics: Variance,
    of_all_processes: bool,
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
    if training_mode and of_all_processes and dist.is_initialized() and dist.get_world_size() > 1:
        y, *of_batch = _normalize_together(x, scale, bias, epsilon, statistics)
        _follow((mean, variance), of_batch, share)
        return y
    if training_mode and statistics == "sample":
        return F.batch_norm(x, mean, variance, scale, bias, True, share, epsilon)
    if training_mode:
        _follow((variance, mean), torch.var_mean(x.detach(), (0, *range(2, x.ndim)), correction=0), share)
    return batch_normalization(
        x, scale, bias, mean, variance, epsilon=epsilon, momentum=momentum, training_mode=training_mode, outputs=1
    )


@torch.no_grad()  # type: ignore[untyped-decorator]
def _follow(running: Iterable[torch.Tensor], of_batch: Iterable[torch.Tensor], share: float) -> None:
    for old, new in zip(running, of_batch, strict=True):
        old.mul_(1 - share).add_(new, alpha=share)


def share_of_batch(momentum: float) -> float:
    """What PyTorch calls the momentum of its layers: 0.1, not 0.10000002."""
    return round(1 - float(str(np.float32(momentum))), 9)


# ---- several processes -----------------------------------------------------------------------------------------------


class _SumOverProcesses(torch.autograd.Function):  # type: ignore[misc]
    """The sum over all processes, through which derivatives go: PyTorch's own is for GPUs, or deprecated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _SumOverProcesses.apply(gradient)


def _normalize_together(
    x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, epsilon: float, statistics: Variance
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is normalized by the statistics of all processes, and these. The batches of some may be smaller."""
    axes = (0, *range(2, x.ndim))
    wide = x.float() if x.element_size() < 4 else x
    count = wide.new_full((1,), x.numel() // x.shape[1])
    sums, number = _SumOverProcesses.apply(torch.cat([wide.sum(axes), count])).split([x.shape[1], 1])
    mean = sums / number
    centred = wide - per_channel(mean, x)
    squares = _SumOverProcesses.apply((centred * centred).sum(axes))
    factor = torch.rsqrt(squares / number + epsilon) * scale
    y = centred * per_channel(factor, x) + per_channel(bias, x)
    return y.to(x.dtype), mean, squares / (number - 1 if statistics == "sample" else number)
