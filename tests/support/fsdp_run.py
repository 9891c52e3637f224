"""A process of a run with FSDP: `torchrun fsdp_run.py FIRST LAST LOAD SAVE`; prints its losses as JSON, from rank 0."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_runs import data, net
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def main(first: int, last: int, load: str, save: str) -> None:
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (count,))
    module = net()
    module[1] = torch.nn.Identity()  # whose statistics would be of a part of the batch
    for layer in module:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    if load != "-":
        weights, kept = get_state_dict(module, optimizer)
        tree: dict[str, Any] = {"model": weights, "optim": kept, "scheduler": scheduler.state_dict()}
        dcp.load(tree, checkpoint_id=load)
        set_state_dict(module, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
        scheduler.load_state_dict(tree["scheduler"])
    losses = _steps(module, optimizer, scheduler, range(first, last), rank, count)
    if save != "-":
        weights, kept = get_state_dict(module, optimizer)
        tree = {"model": weights, "optim": kept, "scheduler": scheduler.state_dict(), "step": last}
        dcp.save(tree, checkpoint_id=save)
    if rank == 0:
        Path(sys.argv[5]).write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def _steps(module: Any, optimizer: Any, scheduler: Any, span: range, rank: int, count: int) -> list[float]:
    inputs, labels = (torch.from_numpy(array[:, :12]) for array in data())
    losses = []
    for i in span:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(inputs[i, rank::count]), labels[i, rank::count])
        loss.backward()
        optimizer.step()
        scheduler.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / count)
    return losses


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
    os._exit(0)  # threads of gloo may still be there, and then the interpreter does not end well
