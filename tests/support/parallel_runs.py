"""What several processes make, beside what one process makes alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import parallel_models
import parallel_steps
from processes import together

import onward


def alone(path: str) -> tuple[list[float], float, dict[str, float]]:
    model = onward.load(path)
    data = parallel_models.batches(model, parallel_steps.STEPS)
    with onward.engines.start(model) as engine:
        losses = [float(engine.step(batch)["loss"]) for batch in data]
        gradients = engine.gradients(data[0])
        norms = {name: float(np.linalg.norm(array)) for name, array in gradients.items()}
        return losses, float(engine.evaluate(data[0])["loss"]), norms


def compare(runs: Sequence[tuple[str, dict[str, Any]]], world: int, to: Path) -> list[dict[str, Any]]:
    """The same losses as of one process on ONNX Runtime, for all models with their options."""
    together(parallel_steps.__file__, world, {"runs": runs, "to": str(to)})
    found = json.loads(to.read_text())
    for (path, chosen), made in zip(runs, found, strict=True):
        losses, evaluated, norms = alone(path)
        np.testing.assert_allclose(made["losses"], losses, rtol=1e-5, err_msg=f"{path} {chosen}")
        np.testing.assert_allclose(made["evaluated"], evaluated, rtol=1e-5, err_msg=f"{path} {chosen}")
        for name, norm in norms.items():
            np.testing.assert_allclose(made["norms"][name], norm, rtol=1e-3, atol=1e-5, err_msg=f"{path} {name}")
    return list(found)


def torch_options(strategy: str) -> dict[str, Any]:
    return {"engine": "torch", "strategy": strategy, "compile": False}


# ---- the command -----------------------------------------------------------------------------------------------------

RUN = ["--loss", "cross_entropy", "--optimizer", "adamw:lr=3e-3", "--clip", "norm:1", "--accumulate", "2"]
RUN += ["--validation", "0.2", "--metric", "f1", "--batch-size", "24", "--quiet"]


def start_training(net: Path, data: Path, run: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "onward", "train", str(net), "--data", str(data), *RUN]
    command += ["--run", str(run), *more]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def train(net: Path, data: Path, run: Path, *more: str) -> onward.Run:
    with start_training(net, data, run, *more) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return onward.Run(run)


def curve(run: onward.Run) -> list[float]:
    kinds = ("step", "epoch", "validation")
    events = [event for event in run.log if event["event"] in kinds]
    return [value for event in events for name, value in event.items() if name in ("loss", "f1", "samples")]
