"""What tests of runs share: small data, and what is in a run."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from models import digits_mlp, small_cnn
from paths import ROOT

import onward
from onward.model.state import states
from onward.training.loop import Loop
from onward.training.run import Run

Arrays = dict[str, np.ndarray]

RECIPE: dict[str, Any] = {"loss": "cross_entropy", "optimizer": "adamw:lr=1e-2"}
QUIET: dict[str, Any] = {"quiet": True, "threads": 1}


def digits(count: int = 96, *, flat: bool = True, seed: int = 0) -> Arrays:
    """Pictures whose class can be seen in their first pixels."""
    images = np.random.default_rng(seed).normal(size=(count, 64)).astype(np.float32)
    labels = images[:, :10].argmax(1)
    return {"image": images if flat else images.reshape(-1, 1, 8, 8), "labels": labels}


def gan_example() -> Any:
    """The example of a GAN, as a module."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    spec = importlib.util.spec_from_file_location("gan", ROOT / "examples" / "gan.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def filled(folder: Path) -> Path:
    onnx.save(small_cnn(), folder / "model.onnx")
    np.savez(folder / "data.npz", **digits(flat=False))
    onnx.save(digits_mlp(), folder / "digits.onnx")
    np.savez(folder / "digits.npz", **digits())
    return folder


def state(run: Run) -> Arrays:
    return {s.name: s.value.const_value.numpy() for s in states(run.model)}  # type: ignore[union-attr]


def outputs(model: onward.Model, images: np.ndarray) -> np.ndarray:
    return ort.InferenceSession(model.to_proto().SerializeToString()).run(None, {"image": images})[0]


def accuracy(model: onward.Model, data: Arrays) -> float:
    return float(np.mean(outputs(model, data["image"]).argmax(1) == data["labels"]))


def interrupted_after(steps: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGINT) -> None:
    """Let a Ctrl-C come in the middle of a step."""
    original = Loop._step

    def step(self: Loop, batch: Arrays) -> None:
        if self.at.step == steps - 1:
            signal.raise_signal(number)
        original(self, batch)

    monkeypatch.setattr(Loop, "_step", step)
