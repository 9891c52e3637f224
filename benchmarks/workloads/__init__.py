"""Workloads of the training benchmark: models, batches and optimizers, defined once for all frameworks.

Each framework has a folder here, with hand-written idiomatic models and a function

    load(workload, folder, threads, **variant) -> step,    step(x, labels) -> loss

whose models start from the weights in `folder`, which `on_torch/export.py` writes. This module
imports no framework: the imports of a worker are part of the measurement.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from fnmatch import fnmatch

import numpy as np

from workloads.architectures import CLASSES, DISTILBERT, GPT, IMAGES, ITEMS, LORA, TAGGER, WORDS, Adapters

BATCHES = 4
"""Batches that repeat. The compared steps see the first batch twice, so they depend on updates, too."""

Batch = tuple[np.ndarray, np.ndarray]
Step = Callable[[np.ndarray, np.ndarray], float]
"""A function (x, labels) -> loss that makes one update, and returns when it is done."""


@dataclasses.dataclass(frozen=True)
class Workload:
    name: str
    title: str
    model: str
    optimizer: str
    rates: Mapping[str, float]
    """Hyperparameters of the optimizer, with the names of PyTorch."""
    batch: int
    steps: int
    """Steps of a turn that are timed."""
    trained: tuple[str, ...] = ("*",)
    """Patterns of trainable weights. A frozen BatchNorm2d keeps its statistics."""
    adapters: Adapters | None = None

    def trains(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self.trained)

    def batches(self) -> list[Batch]:
        """Return the batches, the same for all contenders. Images are [N, C, H, W]."""
        rng = np.random.default_rng(1)
        return [self._batch(rng) for _ in range(BATCHES)]

    def _batch(self, rng: np.random.Generator) -> Batch:
        if self.model == "gpt":
            text = rng.integers(0, GPT.vocabulary, (self.batch, GPT.length + 1))
            return text[:, :-1].copy(), text[:, 1:].copy()
        if self.model == "tagger":
            size = (self.batch, TAGGER.length)
            return rng.integers(0, TAGGER.vocabulary, size), rng.integers(0, TAGGER.tags, size)
        if self.model == "words":
            return rng.integers(0, WORDS, (self.batch, 32)), rng.integers(0, WORDS, (self.batch, 32))
        if self.model == "recommender":
            return rng.integers(0, ITEMS, (self.batch, 8)), rng.integers(0, CLASSES["recommender"], self.batch)
        if self.model == "distilbert":
            x = rng.integers(0, DISTILBERT.vocabulary, (self.batch, DISTILBERT.length))
        else:
            x = rng.standard_normal((self.batch, *IMAGES[self.model]), np.float32)
        shape = x.shape[:2] if self.model == "talking_heads" else self.batch
        return x, rng.integers(0, CLASSES[self.model], shape)


_MOMENTUM, _ADAMW = {"lr": 0.05, "momentum": 0.9}, {"lr": 1e-3, "weight_decay": 0.01}
_SMALL = [
    Workload("mlp_sgd", "MLP 784-512-256-10, batch 128, SGD", "mlp", "sgd", {"lr": 0.1}, 128, 40),
    Workload("mlp_adam", "MLP 784-512-256-10, batch 128, Adam", "mlp", "adam", {"lr": 1e-3}, 128, 30),
    Workload("lenet", "LeNet-5, 28x28, batch 64, momentum", "lenet", "momentum", _MOMENTUM, 64, 30),
    Workload("resnet", "ResNet-8, 32x32, batch 64, momentum", "resnet8", "momentum", _MOMENTUM, 64, 5),
    Workload("gpt", "GPT, 4 layers of 128, 8 x 128 tokens, AdamW", "gpt", "adamw", _ADAMW, 8, 5),
]
_GENTLE_MOMENTUM, _GENTLE_ADAMW = {"lr": 1e-3, "momentum": 0.9}, {"lr": 1e-5, "weight_decay": 0.01}
_LARGE = [
    Workload("resnet18", "ResNet-18, 224x224, batch 16, momentum", "resnet18", "momentum", _GENTLE_MOMENTUM, 16, 1),
    Workload("mobilenet", "MobileNetV3-large, 224x224, batch 16, momentum", "mobilenet", "momentum", _MOMENTUM, 16, 1),
    Workload("vit", "ViT-tiny, 224x224, batch 8, AdamW", "vit", "adamw", _GENTLE_ADAMW, 8, 2),
    Workload("distilbert", "DistilBERT, 8 x 128 tokens, AdamW", "distilbert", "adamw", _GENTLE_ADAMW, 8, 1),
    Workload("gru", "tagger with a GRU of 2 x 256, 32 x 64 tokens, AdamW", "tagger", "adamw", _ADAMW, 32, 3),
    Workload(
        "frozen",
        "ResNet-18, frozen but for its last stage and head, batch 16, momentum",
        "resnet18",
        "momentum",
        _GENTLE_MOMENTUM,
        16,
        1,
        trained=("stages.3.*", "head.*"),
    ),
    Workload(
        "lora",
        "DistilBERT, LoRA of rank 8 in attention, 8 x 128 tokens, AdamW",
        "distilbert",
        "adamw",
        _ADAMW,
        8,
        1,
        trained=("*.lora_A.weight", "*.lora_B.weight"),
        adapters=LORA,
    ),
]
SMALL = {workload.name: workload for workload in _SMALL}
LARGE = {workload.name: workload for workload in _LARGE}
"""Models that people fine-tune, in real sizes."""
WORKLOADS = SMALL | LARGE
_SIZES = {
    "unet": ("U-Net with transposed convolutions", 4),
    "resized_unet": ("U-Net bilinearly resized", 4),
    "generator": ("generator of a GAN", 16),
    "vocoder": ("vocoder", 8),
    "signals": ("CNN of signals", 8),
    "densenet": ("DenseNet", 16),
    "written_out": ("layers with GELU written out", 512),
    "talking_heads": ("attention whose heads are mixed", 8),
    "words": ("30,000 words", 16),
    "recommender": ("recommender of 100,000 items", 8192),
}
LAYERS = {
    name: Workload(name, f"{title}, momentum", name, "momentum", _GENTLE_MOMENTUM, batch, 1)
    for name, (title, batch) in _SIZES.items()
}
"""Small models with layers that the others lack, to measure kernels for these layers."""

WEIGHTS = "weights.npz"
MODEL = "model.onnx"


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
