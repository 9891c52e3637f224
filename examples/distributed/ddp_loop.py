"""Train with DistributedDataParallel, in a plain PyTorch loop.

    torchrun --nproc-per-node 2 examples/distributed/ddp_loop.py cnn trained.onnx

The optimizer clips gradients, after the all-reduce.
"""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from digits import ACCUMULATE, BATCH, prepare_digits
from torch.nn.parallel import DistributedDataParallel

import onward


def main(kind: str, trained: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, *arrays = prepare_digits(kind)
    module, optimizer, scheduler, loss = onward.to_torch(model, sync_batch_norm=True)
    parallel = DistributedDataParallel(module)
    batches = zip(*(torch.from_numpy(array).split(BATCH) for array in arrays), strict=True)
    for i, (inputs, targets) in enumerate(batches, 1):
        is_last = i % ACCUMULATE == 0
        with contextlib.nullcontext() if is_last else parallel.no_sync():
            value = loss(parallel(inputs[rank::world]), targets[rank::world])
            (value / ACCUMULATE).backward()
        if is_last:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean = value.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"loss {mean.item():.8f}")
    if rank == 0:
        onward.from_torch(module, inputs, loss=loss, optimizer=optimizer, scheduler=scheduler).save(trained)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
