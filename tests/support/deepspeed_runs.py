"""Runs of DeepSpeed, and of FSDP2, on processes of this machine: `python deepspeed_runs.py job.json` is one of them.

A job is what `run` below gives each of them. What it trains is the same at every size of the
world, so that losses can be compared. Rank 0 writes them to `losses.json` in `folder`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from processes import meet, together


def configured(stage: int, kind: str = "fp32", **more: Any) -> dict[str, Any]:
    """A configuration with AdamW, a warm-up and a limit of the norm of gradients."""
    precision: dict[str, Any] = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
    }[kind]
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "betas": [0.9, 0.98], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 3, "total_num_steps": 20,
                       "warmup_type": "linear"},
        },
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.5,
        **precision,
        **more,
    }  # fmt: skip


def module() -> Any:
    """Layers with a buffer, a frozen parameter and two names of one tensor, in sizes that cannot be halved."""
    import torch

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.norm = torch.nn.LayerNorm(3)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.hidden = torch.nn.Linear(3, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            self.scale = torch.nn.Parameter(torch.full((3,), 1.5), requires_grad=False)

        def forward(self, tokens: Any) -> Any:
            return self.head(torch.tanh(self.hidden(self.norm(self.embed(tokens)))) * self.scale)

    torch.manual_seed(0)
    return Tied()


def _groups(model: Any, number: int) -> list[dict[str, Any]]:
    """All in one; or two, of which matrices decay, and the rest does not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if number == 1:
        return [{"params": trained}]
    return [
        {"params": [each for each in trained if each.ndim > 1]},
        {"params": [each for each in trained if each.ndim == 1], "weight_decay": 0.0},
    ]


def work(job: dict[str, Any]) -> None:
    import torch

    meet(job)
    losses = _with_fsdp(job) if job["fsdp"] else _with_deepspeed(job)
    if job["rank"] == 0:
        (Path(job["folder"]) / "losses.json").write_text(json.dumps(losses))
    torch.distributed.barrier()


def _loss(model: Any, step: int) -> Any:
    import torch
    from torch.nn.functional import cross_entropy

    tokens = torch.randint(5, (4,), generator=torch.Generator().manual_seed(step))
    return cross_entropy(model(tokens).float(), (tokens + 1) % 5)


def _with_deepspeed(job: dict[str, Any]) -> list[float]:
    import deepspeed

    model = module()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=_groups(model, job["groups"]), config=job["config"], dist_init_required=False
    )
    losses, done = [], 0
    if job["load"]:
        path, _ = engine.load_checkpoint(job["load"])
        assert path is not None
        done = engine.global_steps
    for step in range(done, done + job["steps"]):
        loss = _loss(engine, step)
        engine.backward(loss)
        engine.step()
        engine.module.calls += 1
        losses.append(loss.item())
    if job["tag"]:
        engine.save_checkpoint(job["folder"], tag=job["tag"], client_state={"epoch": 2})
    return losses


def _with_fsdp(job: dict[str, Any]) -> list[float]:
    """Goes on from a distributed checkpoint of PyTorch, with the numbers of its configuration."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = module()
    fully_shard(model, mesh=init_device_mesh("cpu", (job["world"],)))
    optimizer = torch.optim.AdamW(_groups(model, job["groups"]))
    weights, kept = get_state_dict(model, optimizer)
    tree = {"model": weights, "optim": kept, "global_steps": 0}
    dcp.load(tree, checkpoint_id=job["load"])
    set_state_dict(model, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
    losses = []
    for step in range(tree["global_steps"], tree["global_steps"] + job["steps"]):
        optimizer.zero_grad()
        loss = _loss(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job["config"]["gradient_clipping"])
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(
    folder: Path,
    world: int,
    config: dict[str, Any],
    *,
    steps: int = 5,
    tag: str = "",
    load: Path | None = None,
    groups: int = 2,
    fsdp: bool = False,
) -> list[float]:
    """The losses of a run on so many processes, which saves to `folder` as `tag`."""
    folder.mkdir(parents=True, exist_ok=True)
    job = {"config": config, "steps": steps, "folder": str(folder), "tag": tag, "load": str(load) if load else "",
           "groups": groups, "fsdp": fsdp}  # fmt: skip
    together(__file__, world, job)
    return json.loads((folder / "losses.json").read_text())


if __name__ == "__main__":
    work(json.loads(Path(sys.argv[1]).read_text()))
    os._exit(0)  # threads of operators that DeepSpeed has built may not end by themselves
