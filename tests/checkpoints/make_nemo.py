"""Makes the files in `nemo/` as NeMo does: a model, and a checkpoint of Lightning with a configuration of OmegaConf.

NeMo itself is not needed, but torch and omegaconf, with which it makes them.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path

import torch
from omegaconf import OmegaConf

HERE = Path(__file__).parent / "nemo"

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
    HERE.mkdir(exist_ok=True)
    torch.save(tree, HERE / "run.ckpt")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        named = {"target": "nemo.core.classes.ModelPT", "nemo_version": "2.4.0", **CONFIGURATION}
        OmegaConf.save(OmegaConf.create(named), place / "model_config.yaml")
        torch.save(module.state_dict(), place / "model_weights.ckpt")
        (place / "tokenizer.model").write_bytes(b"words")
        with tarfile.open(HERE / "model.nemo", "w:") as archive:
            archive.add(place, arcname=".")
