"""A process of a run whose blocks are sharded, `python fsdp_blocks.py job.json`: its losses, and what it holds."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from layered_models import hugging
from processes import meet
from torch.distributed.fsdp import fully_shard

from onward.frameworks.torch import to_module
from onward.frameworks.torch.module import OnnxModule

STEPS, BATCH, TIME, WORDS = 20, 4, 8, 40

GPT = hugging(
    "GPT2LMHeadModel",
    {"vocab_size": WORDS, "n_positions": 16, "n_embd": 32, "n_layer": 12, "n_head": 2, "use_cache": False},
    lambda: {"input_ids": torch.randint(0, WORDS, (BATCH, TIME))},
    12,
)


def train(module: OnnxModule, rank: int, world: int) -> dict[str, Any]:
    """The mean losses of all processes, the bytes that one of them holds, and the sums of what all have then."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
    data = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(0, WORDS, (BATCH, TIME), generator=data)[rank::world]
        optimizer.zero_grad()
        logits = module(tokens)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), tokens[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world)
    state = [x for parts in optimizer.state.values() for x in parts.values() if x.ndim]
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    sums = {name: float(abs(array).sum()) for name, array in module.arrays().items()}
    return {"losses": losses, "bytes": _bytes([*module.parameters(), *gradients, *state]), "sums": sums}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(getattr(x, "_local_tensor", x).nbytes for x in tensors)


def main(job: dict[str, Any]) -> None:
    meet(job)
    module = to_module(job["model"], blocks=True)
    for block in module.repeated_blocks():
        block.recomputes = job["recomputes"]
        fully_shard(block)
    fully_shard(module)
    found = train(module, job["rank"], job["world"])
    if job["rank"] == 0:
        Path(job["to"]).write_text(json.dumps({**found, "blocks": len(module.repeated_blocks())}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
    os._exit(0)  # threads of gloo may still be there, and then the interpreter does not end well
