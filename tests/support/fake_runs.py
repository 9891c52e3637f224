"""Folders as runs leave them, with numbers that look like those of real ones."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from models import digits_mlp, small_transformer

import onward
from onward.training.log import Log

STEPS_PER_EPOCH, BATCH = 45, 32
STARTED = 1_790_000_000.0

Events = Iterator[dict[str, Any]]


def fake_run(
    folder: Path, *, epochs: int = 5, resumed: bool = False, reason: str | None = "finished", large: bool = False
) -> Path:
    """A run of a small classifier, or of a transformer with many layers; `reason` None is one that was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    proto = small_transformer() if large else digits_mlp()
    name = "small-gpt.onnx" if large else "digits.onnx"
    recipe = {
        "loss": "value:loss" if large else "cross_entropy",
        "optimizer": "adamw:lr=3e-3,weight_decay=0.01",
        "schedule": f"cosine:steps={epochs * STEPS_PER_EPOCH},warmup=20",
    }
    onnx.save(proto, folder / name)
    onward.prepare(str(folder / name), clip="norm:1", **recipe).save(folder / "training.onnx")
    config = {"data": "digits.npz", "validation": 0.2, "batch_size": BATCH, "seed": 7, "epochs": epochs, **recipe}
    (folder / "config.yaml").write_text(json.dumps(config))
    layers = [tensor.name for tensor in proto.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    with Log(folder / "log.jsonl") as log:
        for event in _events(name, recipe, config, layers, epochs, resumed, reason):
            log.write(event.pop("event"), **event)
    return folder


def _events(
    name: str, recipe: dict, config: dict, layers: list[str], epochs: int, resumed: bool, reason: str | None
) -> Events:
    rng = np.random.default_rng(0)
    total = epochs * STEPS_PER_EPOCH
    yield {
        "event": "start", "time": STARTED, "model": name, "parameters": 2410, "recipe": recipe, "config": config,
        "device": "cpu", "engine": "onnxruntime", "steps_per_epoch": STEPS_PER_EPOCH, "epochs": epochs,
    }  # fmt: skip
    yield from _validation(rng, 0, total)
    stop = total if reason in ("finished", "early_stopping") else int(total * 0.7)
    for step in range(1, stop + 1):
        yield from _step(rng, step, total, layers)
        if resumed and step == stop // 2:
            saved = step // STEPS_PER_EPOCH * STEPS_PER_EPOCH
            yield {"event": "resume", "step": saved, "time": STARTED + 3600}
            for again in range(saved + 1, step + 1):
                yield from _step(rng, again, total, layers)
    failure = {"loss": math.nan} if reason == "not_finite" else {}
    if reason is not None:
        yield {"event": "end", "step": stop, "reason": reason, "seconds": stop * 0.0031, **failure}


def _step(rng: np.random.Generator, step: int, total: int, layers: list[str]) -> Events:
    progress = step / total
    loss = 2.3 * math.exp(-5 * progress) * (1 + 0.25 * rng.normal()) + 0.05 * rng.random() + 0.02
    rate = 3e-3 * min(step / 20, 0.5 + 0.5 * math.cos(math.pi * progress))
    yield {
        "event": "step", "step": step, "epoch": (step - 1) // STEPS_PER_EPOCH, "loss": abs(loss),
        "lr": rate, "samples": step * BATCH, "seconds": 0.0021 * (1 + 0.1 * rng.random() + (rng.random() < 0.02)),
    }  # fmt: skip
    if step % 5 == 0:
        depth = {name: math.exp(-0.06 * i - 2 * progress + 0.3 * rng.normal()) for i, name in enumerate(layers)}
        yield {"event": "gradients", "step": step, "norms": depth}
    if step % STEPS_PER_EPOCH == 0:
        yield from _weights(rng, step, total, layers)
        yield from _validation(rng, step, total)
        if progress < 0.85:
            yield {"event": "save", "step": step, "best": True}
        yield {"event": "save", "step": step, "best": False}


def _validation(rng: np.random.Generator, step: int, total: int) -> Events:
    progress = step / total
    yield {
        "event": "validation", "step": step, "epoch": step // STEPS_PER_EPOCH,
        "loss": 2.1 * math.exp(-4.5 * progress) + 0.12 + 0.1 * max(progress - 0.8, 0) + 0.01 * rng.random(),
        "accuracy": 1 - 0.9 * math.exp(-4 * progress) - 0.005 * rng.random() - 0.02,
    }  # fmt: skip


def _weights(rng: np.random.Generator, step: int, total: int, layers: list[str]) -> Events:
    histograms = {}
    for i, name in enumerate(layers):
        spread = (0.1 + 0.02 * (i % 5)) * (1 + step / total)
        values = np.concatenate([rng.normal(0, spread, 600), rng.normal(spread * 2 * step / total, spread / 2, 200)])
        counts, edges = np.histogram(values, 40)
        histograms[name] = {"edges": edges, "counts": counts}
    yield {"event": "weights", "step": step, "histograms": histograms}
