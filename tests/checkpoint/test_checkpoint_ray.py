"""Folders of Ray Train, which are around what a training loop wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import needs
from paths import CHECKPOINTS

import onward
from onward.checkpoint.pytorch.archive import read_torch_file


def around(place: Path, newest: str = "checkpoint_2026-02", **changes: Any) -> Path:
    """A folder as Ray Train leaves it, with two checkpoints, of which the first is better."""
    for name in ("checkpoint_2026-01", "checkpoint_2026-02"):
        (place / name).mkdir(parents=True)
    results = [{"checkpoint_dir_name": name, "metrics": {"loss": 0.5}} for name in (newest, "checkpoint_2026-01")]
    snapshot = {"ray_version": "2.60.0", "checkpoint_results": results, "latest_checkpoint_result": results[0]}
    (place / "checkpoint_manager_snapshot.json").write_text(json.dumps({**snapshot, **changes}))
    return place


def test_what_is_inside_is_found(tmp_path: Path) -> None:
    (folder := around(tmp_path / "a") / "checkpoint_2026-02").rmdir()
    shutil.copytree(CHECKPOINTS / "trainer", folder)
    found = onward.open_checkpoint(tmp_path / "a")
    assert (found.format, found.title) == ("hf", "Ray Train, Hugging Face Trainer") and found.step == 3
    assert found.arguments["ray"] == {"version": "2.60.0", "metrics": {"loss": 0.5}}
    shutil.copytree(CHECKPOINTS / "trainer", around(tmp_path / "b") / "checkpoint_2026-02" / "checkpoint")
    assert onward.open_checkpoint(tmp_path / "b").format == "hf"
    shutil.copy(CHECKPOINTS / "lightning.ckpt", around(tmp_path / "c") / "checkpoint_2026-02" / "checkpoint.ckpt")
    inner = onward.open_checkpoint(tmp_path / "c")
    assert (inner.format, inner.title) == ("lightning", "Ray Train, Lightning 2.6.6")


def test_broken_folders_of_ray(tmp_path: Path) -> None:
    for at, (changes, words) in enumerate([
        ({"newest": "../../etc"}, "leads out"),
        ({"newest": "checkpoint_2026-03"}, "is missing"),
        ({}, "holds no checkpoint"),
        ({"latest_checkpoint_result": 3}, "names no checkpoint"),
        ({"latest_checkpoint_result": None}, "names no checkpoint"),
    ]):  # fmt: skip
        with pytest.raises(onward.Error, match=words):
            onward.open_checkpoint(around(tmp_path / str(at), **changes))


@needs("torch")
@pytest.mark.parametrize("files", [("state.pt",), ("model.pt", "optimizer.pt")])
def test_losses_go_on_in_ray(files: tuple[str, ...], tmp_path: Path) -> None:
    """A loop of PyTorch in Ray loads what was written where Ray says its newest checkpoint is."""
    import torch

    def begin() -> tuple[Any, Any]:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        return module, torch.optim.AdamW(module.parameters(), lr=0.05)

    def steps(module: Any, optimizer: Any, start: int) -> list[float]:
        losses = []
        for step in range(start, start + 5):
            optimizer.zero_grad()
            loss = module(torch.full((2, 3), step / 10)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    module, optimizer = begin()
    steps(module, optimizer, 0)
    folder = around(tmp_path / "a") / "checkpoint_2026-02"
    parts = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    if len(files) == 1:
        torch.save({**parts, "epoch": 5}, folder / files[0])
    else:
        for name, part in zip(files, parts.values(), strict=True):
            torch.save(part, folder / name)
    whole = steps(module, optimizer, 5)

    found = onward.open_checkpoint(tmp_path / "a")
    assert found.optimizers[0].families == ("adamw",) and list(found.tensors) == list(module.state_dict())
    onward.to_checkpoint(found, tmp_path / "b", format="ray")
    said = json.loads((tmp_path / "b" / "checkpoint_manager_snapshot.json").read_text())
    newest = tmp_path / "b" / said["latest_checkpoint_result"]["checkpoint_dir_name"]
    assert said["latest_checkpoint_result"]["metrics"] == {"loss": 0.5}
    module, optimizer = begin()
    loaded = [torch.load(newest / name, weights_only=True) for name in files]
    kept = loaded[0] if len(files) == 1 else dict(zip(parts, loaded, strict=True))
    module.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    assert steps(module, optimizer, 5) == whole


def test_any_checkpoint_can_be_written_for_ray(tmp_path: Path) -> None:
    source = onward.open_checkpoint(CHECKPOINTS / "deepspeed" / "zero1")
    onward.to_checkpoint(source, tmp_path / "b", format="ray")
    again = onward.open_checkpoint(tmp_path / "b")
    assert again.format == "deepspeed" and np.array_equal(
        again.tensors["hidden.weight"].array(), source.tensors["hidden.weight"].array()
    )
    onward.to_checkpoint(onward.open_checkpoint(CHECKPOINTS / "lightning.ckpt"), tmp_path / "c", format="ray")
    assert "state_dict" in read_torch_file(tmp_path / "c" / "checkpoint_000004" / "checkpoint.ckpt")


@pytest.mark.slow
def test_ray_reads_the_list(tmp_path: Path) -> None:
    manager = pytest.importorskip("ray.train.v2._internal.execution.checkpoint.checkpoint_manager")
    source = onward.open_checkpoint(CHECKPOINTS / "deepspeed" / "zero1")
    onward.to_checkpoint(source, tmp_path / "b", format="ray")
    said = json.loads((tmp_path / "b" / "checkpoint_manager_snapshot.json").read_text())
    state = manager._CheckpointManagerState(**said)
    assert state.latest_checkpoint_result.checkpoint_dir_name == "checkpoint_000005"
