"""Sums over the processes that train together, as operators of PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh

from onward.engines.distributed import join_group
from onward.engines.torch import Torch


class SumUnderWay:
    """The sum over all shares of a batch, which is exchanged while this process goes on."""

    def __init__(self, x: torch.Tensor):
        self._copies = join_group().copies
        self._total = x.detach().clone(memory_format=torch.contiguous_format)
        self._work = dist.all_reduce(self._total, async_op=True)

    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._total if self._copies == 1 else self._total / self._copies


def derivative_of_common_sum() -> float:
    """Of a sum by one share, where all know the derivative of what follows: such that the mean is the gradient."""
    group = join_group()
    return group.size / group.copies


@torch.library.custom_op("onward::sum_over_shares", mutates_args=(), schema="(Tensor x, bool is_common) -> Tensor")
def sum_over_shares(x: torch.Tensor, is_common: bool) -> torch.Tensor:
    """As an operator it can be recorded."""
    return SumUnderWay(x).wait()


@sum_over_shares.register_fake
def _(x: torch.Tensor, is_common: bool) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[torch.Tensor, bool], output: torch.Tensor) -> None:
    ctx.is_common = inputs[1]


def _differentiate(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Another sum, unless all know it already."""
    return dy * derivative_of_common_sum() if ctx.is_common else sum_over_shares(dy, False), None


sum_over_shares.register_autograd(_differentiate, setup_context=_remember)


class Together(Torch):
    """PyTorch with gradients left on, and sums over processes."""

    def __init__(self, device: torch.device, mesh: DeviceMesh | None, **options: Any):
        super().__init__(str(device), **options)
        over = mesh.get_group(mesh.ndim - 1) if mesh is not None else None

        def sum_over_all(x: torch.Tensor, *, common: int = 0) -> torch.Tensor:
            return sum_over_shares(x, bool(common))

        def sum_over_shards(x: torch.Tensor) -> torch.Tensor:
            return funcol.wait_tensor(funcol.all_reduce(x, "sum", over))

        self.operators["onward.AllReduce"] = sum_over_all if mesh is None else sum_over_shards

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        is_on = torch.is_grad_enabled()
        with super().active(), torch.set_grad_enabled(is_on):
            yield
