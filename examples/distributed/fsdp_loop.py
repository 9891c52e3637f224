"""Train with FSDP2, in a plain PyTorch loop.

    torchrun --nproc-per-node 2 examples/distributed/fsdp_loop.py gpt checkpoint/

Each process has a shard of each parameter, gradient and moment, and gathers one block at a time. To
resume elsewhere, call `onward.from_checkpoint("checkpoint", model, schedule=...)`.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from digits import ACCUMULATE, BATCH, prepare_digits
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh

import onward
from onward.distribute.torch_fsdp import shard_blocks


def main(kind: str, checkpoint: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, *arrays = prepare_digits(kind)
    module, optimizer, scheduler, loss = onward.to_torch(model, blocks=True, sync_batch_norm=True)
    shard_blocks(module, optimizer, mesh=init_device_mesh("cpu", (world,)))
    batches = zip(*(torch.from_numpy(array).split(BATCH) for array in arrays), strict=True)
    for i, (inputs, targets) in enumerate(batches, 1):
        value = loss(module(inputs[rank::world]), targets[rank::world])
        (value / ACCUMULATE).backward()
        if i % ACCUMULATE == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean = value.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"loss {mean.item():.8f}")
    weights, slots = get_state_dict(module, optimizer)
    dcp.save({"model": weights, "optim": slots, "scheduler": scheduler.state_dict()}, checkpoint_id=checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
