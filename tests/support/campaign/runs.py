"""Folders of runs: what a run needs to go on, and what is read to look at it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from models import digits_mlp
from onnx import ModelProto

import onward
from campaign.data import no_file
from campaign.kinds import Kind
from campaign.models import PROTOBUF
from campaign.mutations import BYTES, JSON, changed_json, changed_lines
from onward.training.run import Run


def _run(folder: Path) -> None:
    """One that has its weights beside the model, and some of them frozen, in the middle of an epoch."""
    rng = np.random.default_rng(0)
    np.savez(folder / "data.npz", image=rng.random((16, 64), np.float32), labels=rng.integers(0, 10, 16))
    onward.load(digits_mlp(hidden=8)).save(folder / "model.onnx", data="data")
    onward.train(
        folder / "model.onnx",
        folder / "data.npz",
        loss="ce",
        freeze="fc2.*",
        batch_size=4,
        validation=0.25,
        patience=3,
        run=folder / "run",
        tensorboard=True,
        quiet=True,
        threads=1,
    )
    (folder / "run" / "config.yaml").write_text(json.dumps(Run(folder / "run").config))  # which is YAML, too


def changed_progress(rng: random.Random, data: bytes) -> bytes:
    """A training model that says it stands elsewhere."""
    proto = ModelProto.FromString(data)
    for entry in proto.training_info[0].algorithm.metadata_props:
        if entry.key == "train.progress":
            entry.value = changed_json(rng, entry.value.encode()).decode()
    return proto.SerializeToString()


def look() -> None:
    run = Run("run")
    assert all(isinstance(what, dict) for what in (run.config, run.progress, run.results, *run.log))
    assert run.best.graph and run.last.graph


RESUME = ("train", "--resume", "run", "--data", "data.npz", "--epochs", "2", "--force", "-o", "out.onnx")
KINDS = {
    "runs": Kind(
        _run,
        {
            "run/config.yaml": (*JSON, *(changed_json,) * 12),
            "run/training.onnx": (*PROTOBUF, *(changed_progress,) * 24),
            "run/log.jsonl": (changed_lines, changed_lines, *BYTES),
            "run/.lock": BYTES,
            "run/original.onnx": PROTOBUF,
            "run/*.data": BYTES,
            "run/events.*": BYTES,
        },
        (RESUME, RESUME, ("report", "run"), look),
        no_file,
    ),
}
