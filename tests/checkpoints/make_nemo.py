"""Makes `nemo.ckpt`: a checkpoint of Lightning as NeMo leaves it, with a configuration of OmegaConf in it."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import OmegaConf

SCHEDULE = {"name": "CosineAnnealing", "warmup_steps": 2}
CONFIGURATION = {
    "optim": {
        "name": "adamw",
        "lr": 0.01,
        "betas": [0.9, 0.98],
        "sched": {"name": "CosineAnnealing", "warmup_steps": 2},
    },
    "hidden": 4,
    "same": "${hidden}",
    "nothing": None,
}

if __name__ == "__main__":
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tree = {
        "epoch": 0,
        "global_step": 1,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "hyper_parameters": {"cfg": OmegaConf.create(CONFIGURATION)},
    }
    torch.save(tree, Path(__file__).parent / "nemo.ckpt")
