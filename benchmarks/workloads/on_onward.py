"""The workloads in Onward: the model that PyTorch exported, a loss and an optimizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import onward
import onward.engines
from workloads import MODEL, Step, Workload
from workloads.architectures import Adapters

ADAPTERS = "adapters.safetensors"


def training_model(workload: Workload, folder: Path) -> onward.Model:
    rates = ",".join(f"{name}={value}" for name, value in workload.rates.items())
    return onward.prepare(
        folder / MODEL,
        loss="cross_entropy:axis=-1",
        optimizer=f"{workload.optimizer}:{rates}",
        variance="sample",
        lora=_lora(workload.adapters) if workload.adapters else None,
        trainable=None if workload.adapters or workload.trained == ("*",) else list(workload.trained),
    )


def _lora(adapters: Adapters) -> str:
    return f"rank={adapters.rank},alpha={adapters.alpha},targets={adapters.targets}"


def initial_adapters(adapters: Adapters, folder: Path) -> dict[str, np.ndarray]:
    """Return the initial adapters of a training model by their names in PEFT."""
    from safetensors.numpy import load_file

    adapted = onward.lora.add(folder / MODEL, **adapters._asdict())
    tensors = load_file(onward.lora.save(adapted, folder / ADAPTERS))
    return {name.removeprefix("base_model.model."): array for name, array in tensors.items()}


def load(workload: Workload, folder: Path, threads: int, *, engine: str = "onnxruntime") -> Step:
    options = {"threads": threads} if engine in ("onnxruntime", "torch") else {}
    running = onward.engines.start(training_model(workload, folder), engine=engine, **options)
    return lambda x, labels: float(running.step({"x": x, "labels": labels})["loss"])
