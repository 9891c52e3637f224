"""What the benchmark of training trains: models, batches and optimizers, said once for all frameworks.

Each framework has a file here, with the models hand-written as its users write them, and a function

    load(workload, folder, **variant) -> step,    step(x, labels) -> loss

whose models start from the weights in `folder`, which `on_torch.export` writes. Nothing here imports a framework: what
a worker imports is part of what is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

THREADS = 2
BATCHES = 4
"""Batches that are trained on in turn. The first returns among the compared steps, to show what was learned."""

Batch = tuple[np.ndarray, np.ndarray]
Step = Callable[[np.ndarray, np.ndarray], float]
"""A training step for a batch: it returns the loss when the step is done."""


@dataclasses.dataclass(frozen=True)
class Workload:
    name: str
    title: str
    model: str
    optimizer: str
    rates: Mapping[str, float]
    """Numbers of the optimizer, as PyTorch calls them."""
    batch: int
    steps: int
    """How many steps a turn has."""

    def batches(self) -> list[Batch]:
        """The same for all: images are [N, C, H, W]."""
        rng = np.random.default_rng(1)
        return [self._batch(rng) for _ in range(BATCHES)]

    def _batch(self, rng: np.random.Generator) -> Batch:
        if self.model == "gpt":
            text = rng.integers(0, VOCABULARY, (self.batch, LENGTH + 1))
            return text[:, :-1].copy(), text[:, 1:].copy()
        x = rng.standard_normal((self.batch, *SAMPLES[self.model]), np.float32)
        return x, rng.integers(0, CLASSES, self.batch)


CLASSES = 10
SAMPLES = {"mlp": (784,), "lenet": (1, 28, 28), "resnet": (3, 32, 32)}
VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 256, 128, 128, 4, 4
"""Of the GPT."""

_ALL = [
    Workload("mlp_sgd", "MLP 784-512-256-10, batch 128, SGD", "mlp", "sgd", {"lr": 0.1}, 128, 40),
    Workload("mlp_adam", "MLP 784-512-256-10, batch 128, Adam", "mlp", "adam", {"lr": 1e-3}, 128, 30),
    Workload("lenet", "LeNet-5, 28x28, batch 64, momentum", "lenet", "momentum", {"lr": 0.05, "momentum": 0.9}, 64, 30),
    Workload(
        "resnet", "ResNet-8, 32x32, batch 64, momentum", "resnet", "momentum", {"lr": 0.05, "momentum": 0.9}, 64, 5
    ),
    Workload(
        "gpt",
        "GPT, 4 layers of 128, 8 x 128 tokens, AdamW",
        "gpt",
        "adamw",
        {"lr": 1e-3, "weight_decay": 0.01},
        8,
        5,
    ),
]
WORKLOADS = {workload.name: workload for workload in _ALL}

WEIGHTS = "weights.npz"
MODEL = "model.onnx"
