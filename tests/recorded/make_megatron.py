"""Makes the checkpoint of Megatron-core in this folder, on two processes that share tensors: `python make_megatron.py`.

There is no GPU here, and Megatron's own models and optimizers want one. The tensors are those of a small model in
bfloat16; how they are cut, named and saved is Megatron's. `whole.npz` has them whole.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
HERE = Path(__file__).parent / "megatron"
FOLDER = HERE / "iter_0000005"

from processes import meet, together  # noqa: E402

SHAPES = {
    "embedding.word_embeddings.weight": (6, 4),
    "decoder.layers.mlp.linear_fc1.weight": (2, 8, 4),
    "decoder.layers.mlp.linear_fc1.bias": (2, 8),
    "decoder.final_layernorm.weight": (4,),
}
"""By the keys of Megatron, which has the layers of a block in one tensor. Those of layers are cut along their rows."""
SCHEDULE = {
    "max_lr": 0.01, "lr_warmup_steps": 16, "num_steps": 40, "lr_decay_style": "cosine", "lr_decay_steps": 160,
    "min_lr": 0.001, "start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant", "wd_incr_steps": 0,
}  # fmt: skip


def whole(kind: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed({"weight": 0, "exp_avg": 1, "exp_avg_sq": 2}[kind])
    return {name: torch.rand(shape, generator=draw) for name, shape in SHAPES.items()}


def without_gpu() -> None:
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")


def sharded(rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of the model and of its optimizer, of one process."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    def cut(name: str, tensor: torch.Tensor, layer: int) -> torch.Tensor:
        if not name.startswith("decoder.layers"):
            return tensor.clone()
        return tensor[layer].chunk(world)[rank].clone()

    weights, first, second = whole("weight"), whole("exp_avg"), whole("exp_avg_sq")
    model, state, masters = {}, {}, []
    for name in SHAPES:
        for layer in range(2 if name.startswith("decoder.layers") else 1):
            parameter = cut(name, weights[name], layer)
            axes = [(0, layer, 2), (1, rank, world)] if name.startswith("decoder.layers") else []
            replica = 0 if axes else rank
            made = ShardedTensor.from_rank_offsets(
                name, parameter.to(torch.bfloat16), *axes, prepend_axis_num=1 if axes else 0, replica_id=replica
            )
            number = len(state)
            model[f"{name}/{layer}"] = made
            masters.append(make_sharded_optimizer_tensor(made, parameter, "optimizer.state.fp32_param"))
            state[number] = {
                slot: make_sharded_optimizer_tensor(made, cut(name, held[name], layer), f"optimizer.state.{slot}")
                for slot, held in (("exp_avg", first), ("exp_avg_sq", second))
            }
    rate = 0.001 + 0.009 * (1 + math.cos(math.pi / 6)) / 2
    group = {"lr": rate, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False, "maximize": False,
             "decoupled_weight_decay": True, "lr_mult": 1.0, "is_expert_parallel": False,
             "is_decoupled_lr": False}  # fmt: skip
    groups = [{**group, "weight_decay": 0.1, "wd_mult": 1.0}, {**group, "weight_decay": 0.0, "wd_mult": 0.0}]
    optimizer = {
        "optimizer": {"state": {**state, "common_step": torch.tensor(5.0)}, "param_groups": groups},
        "fp32_from_fp16_params": [masters],
        "grad_scaler": {},
    }
    return model, optimizer


def work(job: dict[str, Any]) -> None:
    meet(job)
    without_gpu()
    resume(job) if job["resumes"] else save(job)


def save(job: dict[str, Any]) -> None:
    from megatron.core.dist_checkpointing import ShardedObject, save

    model, optimizer = sharded(job["rank"], job["world"])
    random = ShardedObject(
        "rng_state", [{"torch_rng_state": torch.get_rng_state()}], (1, job["world"]), (0, job["rank"]), replica_id=0
    )
    tree = {
        "args": argparse.Namespace(
            optimizer="adam", lr=0.01, lr_warmup_init=0.0, clip_grad=1.0, global_batch_size=8, bf16=True,
            tensor_model_parallel_size=2, pipeline_model_parallel_size=1, num_layers=2, consumed_train_samples=40,
        ),
        "checkpoint_version": 3.0,
        "iteration": 5,
        "model": model,
        "optimizer": optimizer,
        "opt_param_scheduler": SCHEDULE,
        "rng_state": random,
    }  # fmt: skip
    save(tree, job["folder"])


def resume(job: dict[str, Any]) -> None:
    """Load a checkpoint in Megatron, for another number of processes: each gets its own part of every tensor."""
    from megatron.core.dist_checkpointing import load

    expected, found = sharded(job["rank"], job["world"]), sharded(job["rank"], job["world"])
    for each in _shards(found):
        each.data = torch.zeros_like(each.data)
    read = load({"model": found[0], "optimizer": found[1]}, job["folder"])
    tensors = _tensors((read["model"], read["optimizer"]))
    assert len(tensors) == len(_shards(expected)) + 1
    for mine, theirs in zip(tensors, [*_tensors(expected)], strict=True):
        assert torch.equal(mine, theirs)
    assert read["iteration"] == 5 and read["optimizer"]["optimizer"]["param_groups"][1]["weight_decay"] == 0.0
    assert read["opt_param_scheduler"] == SCHEDULE and read["args"].num_layers == 2


def _shards(tree: Any) -> list[Any]:
    return [each for each in _leaves(tree) if hasattr(each, "global_offset")]


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves = [each.data if hasattr(each, "global_offset") else each for each in _leaves(tree)]
    return [each for each in leaves if isinstance(each, torch.Tensor)]


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict | list | tuple):
        inside = [tree[key] for key in sorted(tree, key=str)] if isinstance(tree, dict) else tree
        return [leaf for each in inside for leaf in _leaves(each)]
    return [tree]


def make() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    together(__file__, 2, {"folder": str(FOLDER), "resumes": False})
    (HERE / "latest_checkpointed_iteration.txt").write_text("5")
    parts = {kind: whole(kind) for kind in ("weight", "exp_avg", "exp_avg_sq")}
    arrays = {f"{name}:{kind}": held[name].numpy() for kind, held in parts.items() for name in SHAPES}
    np.savez_compressed(HERE / "whole.npz", **arrays)


if __name__ == "__main__":
    work(json.loads(Path(sys.argv[1]).read_text())) if len(sys.argv) > 1 else make()
