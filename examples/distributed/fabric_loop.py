"""Train with Lightning Fabric, in your own loop.

    torchrun --nproc-per-node 2 examples/distributed/fabric_loop.py cnn trained.onnx

The loader has the batches of one process. The optimizer clips gradients.
"""

from __future__ import annotations

import os
import sys

import torch
from digits import ACCUMULATE, BATCH, prepare_digits
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

import onward


def main(kind: str, trained: str) -> None:
    model, *arrays = prepare_digits(kind)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    fabric.launch()
    module, optimizer, scheduler, loss = onward.to_torch(model, sync_batch_norm=True)
    module, optimizer = fabric.setup(module, optimizer)
    data = TensorDataset(*map(torch.from_numpy, arrays))
    loader = fabric.setup_dataloaders(DataLoader(data, BATCH // fabric.world_size))
    for i, (inputs, targets) in enumerate(loader, 1):
        is_last = i % ACCUMULATE == 0
        with fabric.no_backward_sync(module, enabled=not is_last and fabric.world_size > 1):
            value = loss(module(inputs), targets)
            fabric.backward(value / ACCUMULATE)
        if is_last:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        fabric.print(f"loss {fabric.all_reduce(value.detach()).item():.8f}")
    if fabric.is_global_zero:
        onward.from_torch(module, inputs, loss=loss, optimizer=optimizer, scheduler=scheduler).save(trained)
    fabric.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
