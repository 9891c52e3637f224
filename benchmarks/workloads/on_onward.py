"""The workloads in Onward: the model that PyTorch has exported, a loss and an optimizer."""

from __future__ import annotations

from pathlib import Path

import onward
import onward.engines
from workloads import MODEL, THREADS, Step, Workload


def training_model(workload: Workload, folder: Path) -> onward.Model:
    rates = ",".join(f"{name}={value}" for name, value in workload.rates.items())
    return onward.prepare(
        folder / MODEL,
        loss="cross_entropy:axis=-1",
        optimizer=f"{workload.optimizer}:{rates}",
        variance="sample",
    )


def load(workload: Workload, folder: Path, *, engine: str = "onnxruntime") -> Step:
    options = {"threads": THREADS} if engine in ("onnxruntime", "torch") else {}
    running = onward.engines.start(training_model(workload, folder), engine=engine, **options)
    return lambda x, labels: float(running.step({"x": x, "labels": labels})["loss"])
