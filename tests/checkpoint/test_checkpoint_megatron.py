"""Checkpoints of Megatron: what Onward reads is what Megatron cut in pieces, and Megatron loads what is written."""

from __future__ import annotations

import argparse
import math
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from marks import needs
from paths import CHECKPOINTS
from processes import together

import onward
from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytorch.archive import read_torch_file, write_torch_file
from onward.recipe.spec import Spec
from onward.vocabulary.megatron import schedule_words

RECORDED = CHECKPOINTS / "megatron"
VECTORS = ("decoder.layers.mlp.linear_fc1.bias", "decoder.final_layernorm.weight")


def agrees(found: Checkpoint) -> None:
    """All is there, whole, as it was before Megatron cut it."""
    expected = dict(np.load(RECORDED / "whole.npz"))
    (optimizer,) = found.optimizers
    assert len(found.tensors) * 3 == len(expected)
    for key, value in expected.items():
        name, kind = key.split(":")
        if kind == "weight":
            assert np.array_equal(found.tensors[name].array(), value.astype(ml_dtypes.bfloat16))
        held = optimizer.slots[name]["master" if kind == "weight" else kind]
        assert held.dtype == np.float32 and np.array_equal(held.array(), value)


def test_what_megatron_cut_is_put_together() -> None:
    found = onward.open_checkpoint(RECORDED)
    agrees(found)
    assert (found.format, found.step) == ("megatron", 5)
    assert found.progress == {"iteration": 5, "consumed_train_samples": 40}
    assert found.layout == {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    assert found.clip == {"norm": 1.0, "variant": "torch"} and found.arguments["num_layers"] == 2
    assert [(each.kind, each.rank) for each in found.randomness] == [("torch, CPU", 0), ("torch, CPU", 1)]
    decayed, plain = found.optimizers[0].groups
    assert plain.parameters == VECTORS and len(decayed.parameters) == 2
    assert decayed.optimizer is not None and plain.optimizer is not None
    assert decayed.optimizer.options["weight_decay"] == 0.1 and plain.optimizer.options["weight_decay"] == 0.0
    assert decayed.optimizer.options["lr"] == 0.01 and found.optimizers[0].count == 5
    assert found.schedules[0].words == (
        Spec("cosine", {"steps": 20.0, "min": 0.001, "after": "floor", "warmup": 2.0, "warmup_start": 0.0}),
    )
    assert found.missing == ("loss", "gradient accumulation")
    assert any("rule" in remark for remark in found.remarks)
    assert onward.open_checkpoint(RECORDED / "iter_0000005").step == 5


def test_schedules_of_megatron() -> None:
    state = {"max_lr": 0.1, "min_lr": 0.01, "lr_warmup_steps": 8, "num_steps": 20, "lr_decay_steps": 40}
    rise = {"warmup": 2.0, "warmup_start": 0.5}
    said = {
        "constant": (Spec("constant", rise),),
        "linear": (Spec("linear", {"steps": 10.0, "end_factor": 0.01 / 0.1, **rise}),),
        "inverse-square-root": None,
        "WSD": None,
    }
    for style, words in said.items():
        assert schedule_words({**state, "lr_decay_style": style}, 0.05, 5) == words
    assert schedule_words({**state, "lr_decay_style": "linear", "num_steps": 21}, 0.05, 5) is None


def test_what_is_written_for_megatron_is_read_back(tmp_path: Path) -> None:
    found = onward.open_checkpoint(RECORDED)
    onward.to_checkpoint(found, tmp_path / "again", format="megatron")
    again = onward.open_checkpoint(tmp_path / "again")
    agrees(again)
    assert again.schedules == found.schedules and again.progress == found.progress
    assert [g.settings for g in again.optimizers[0].groups] == [g.settings for g in found.optimizers[0].groups]
    assert len(again.randomness) == 2


def test_another_checkpoint_for_megatron(tmp_path: Path) -> None:
    """DeepSpeed's parameters in bfloat16 with masters, as Megatron has them."""
    source = onward.open_checkpoint(CHECKPOINTS / "deepspeed" / "zero3")
    onward.to_checkpoint(source, tmp_path / "x", format="megatron")
    found = onward.open_checkpoint(tmp_path / "x")
    assert found.step == 5 and found.optimizers[0].count == 5 and found.tensors.keys() == source.tensors.keys()
    for name, held in source.optimizers[0].slots.items():
        for slot in ("master", "exp_avg", "exp_avg_sq"):
            assert np.array_equal(found.optimizers[0].slots[name][slot].array(), held[slot].array())


def old(tree: dict[str, Any], place: Path) -> Path:
    """A checkpoint as Megatron wrote them before, of one process."""
    (place / "iter_0000003" / "mp_rank_00").mkdir(parents=True)
    (place / "latest_checkpointed_iteration.txt").write_text("3")
    write_torch_file(place / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt", tree)
    return place


@needs("torch")
def test_old_checkpoints_of_megatron(tmp_path: Path) -> None:
    import torch

    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tree = {
        "args": argparse.Namespace(optimizer="adam", clip_grad=0.0),
        "iteration": 3,
        "model": {"language_model": {"encoder": module.state_dict()}},
        "optimizer": optimizer.state_dict(),
        "rng_state": [{"torch_rng_state": torch.get_rng_state()}],
    }
    torch.save(tree, tmp_path / "x.pt")
    found = onward.open_checkpoint(old(read_torch_file(tmp_path / "x.pt"), tmp_path / "y"))
    assert list(found.tensors) == ["language_model.encoder.weight", "language_model.encoder.bias"]
    assert found.step == 3 and found.clip == {} and len(found.randomness) == 1
    (kept,) = found.optimizers
    assert kept.families == ("adamw",) and not kept.has_names and kept.groups[0].settings["lr"] == 0.1
    assert np.array_equal(kept.slots[0]["exp_avg"].array(), optimizer.state_dict()["state"][0]["exp_avg"].numpy())
    shutil.copytree(tmp_path / "y/iter_0000003/mp_rank_00", tmp_path / "y/iter_0000003/mp_rank_01")
    with pytest.raises(onward.Error, match="2 processes"):
        onward.open_checkpoint(tmp_path / "y")


def test_broken_checkpoints_of_megatron(tmp_path: Path) -> None:
    place = shutil.copytree(RECORDED, tmp_path / "x")
    (place / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(onward.Error, match="no known checkpoint format"):
        onward.open_checkpoint(place)
    inner = place / "iter_0000005"
    (inner / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(onward.Error, match="`zarr`"):
        onward.open_checkpoint(inner)
    (inner / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    write_torch_file(inner / "common.pt", {"iteration": 5, "optimizer": {"param_groups": [3]}})
    with pytest.raises(onward.Error, match="not a whole checkpoint"):
        onward.open_checkpoint(inner)


def test_rates_of_the_recorded_run() -> None:
    found = onward.open_checkpoint(RECORDED)
    expected = 0.001 + 0.009 * (1 + math.cos(math.pi * 3 / 18)) / 2
    assert math.isclose(found.optimizers[0].groups[0].settings["lr"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_megatron_loads_what_is_written(world: int, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    onward.to_checkpoint(onward.open_checkpoint(RECORDED), tmp_path / "again", format="megatron")
    job = {"folder": str(tmp_path / "again" / "iter_0000005"), "resumes": True}
    together(str(CHECKPOINTS / "make_megatron.py"), world, job)
