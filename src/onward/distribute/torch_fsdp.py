"""FSDP2 of PyTorch: shards of a module and its optimizer, block by block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from onward.errors import UnsupportedError
from onward.frameworks.torch.exact import MasterWeights


def shard_blocks(module: nn.Module, optimizer: Optimizer, **options: Any) -> None:
    """Shard a module of `onward.to_torch(..., blocks=True)` and its optimizer in place.

    `fully_shard`, which gets the options, replaces parameters by shards. The optimizer still refers
    to the whole parameters; its moments are sharded like them.
    """
    if isinstance(optimizer, MasterWeights):
        raise UnsupportedError(
            "cannot shard float32 master weights: the optimizer updates whole copies",
            hint="onward train --engine torch --strategy fsdp",
        )
    before = dict(module.named_parameters())
    for block in module.repeated_blocks():
        fully_shard(block, **options)
    fully_shard(module, **options)
    shards = {id(before[name]): shard for name, shard in module.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [shards[id(parameter)] for parameter in group["params"]]
    for parameter, state in list(optimizer.state.items()):
        del optimizer.state[parameter]
        shard = shards[id(parameter)]
        optimizer.state[shard] = {name: _shard_like(value, shard) for name, value in state.items()}


def _shard_like(value: Any, shard: DTensor) -> Any:
    """Return a moment sharded like its parameter; other values unchanged."""
    if not isinstance(value, torch.Tensor) or value.shape != shard.shape or not value.ndim:
        return value
    return distribute_tensor(value, shard.device_mesh, shard.placements)
