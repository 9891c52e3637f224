"""One training run in four places: begun in PyTorch, continued in Keras, finished in JAX; and all in ONNX Runtime.

    make relay

A convolutional network learns scikit-learn's digits. PyTorch, with its own module, optimizer and scheduler, makes the
first third of the steps. What it hands over is one ONNX file: weights, moments, schedule, how far it is. Keras goes on
with it, then JAX with optax. ONNX Runtime starts from the same file as PyTorch did and runs all the way, and so does
PyTorch: the curves lie on each other. Files, losses and a picture are in examples/relay/out/.

With MNIST's IDX files in a folder, packed or not: `python examples/relay/relay.py --mnist FOLDER`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"}

import jax
import numpy as np
import torch
from picture import draw
from sklearn.datasets import load_digits
from torch import nn

import onward
import onward.engines

OUT = Path(__file__).parent / "out"
BATCH = 64
LEG = 30

Batch = dict[str, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mnist", type=Path, help="a folder with train-images-idx3-ubyte[.gz] and its labels")
    parser.add_argument("--leg", type=int, default=LEG, help="steps in each framework")
    given = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    images, labels = mnist(given.mnist) if given.mnist else digits()
    legs = [list(batches(images, labels, given.leg, seed)) for seed in range(3)]
    everything = [batch for leg in legs for batch in leg]

    runner = Native(images.shape[-1])
    runner.handed_over(OUT / "0-start.onnx")
    first = runner.train(legs[0])
    runner.handed_over(OUT / "1-from-pytorch.onnx")
    alone = first + runner.train(legs[1] + legs[2])
    curves = {
        "PyTorch": (0, first),
        "Keras": (given.leg, in_keras(OUT / "1-from-pytorch.onnx", OUT / "2-from-keras.onnx", legs[1])),
        "JAX": (2 * given.leg, in_jax(OUT / "2-from-keras.onnx", OUT / "3-from-jax.onnx", legs[2])),
        "ONNX Runtime": (0, in_onnxruntime(OUT / "0-start.onnx", everything)),
    }
    for name, (start, losses) in curves.items():
        apart = max(abs(a - b) / b for a, b in zip(losses, alone[start:], strict=False))
        print(f"{name:13} steps {start:3} to {start + len(losses):3}: at most {apart:.1e} from PyTorch alone")
    (OUT / "losses.json").write_text(json.dumps({name: losses for name, (_, losses) in curves.items()}))
    draw(curves, OUT / "relay.svg")
    print(f"wrote {OUT / 'relay.svg'}")


# ---- the four ------------------------------------------------------------------------------------------------------


class Native:
    """A training as PyTorch's users write it."""

    def __init__(self, size: int) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * (size // 2) ** 2, 10),
        )
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=3e-3, eps=1e-3, weight_decay=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.98)
        self.example = torch.rand(4, 1, size, size)

    def train(self, leg: list[Batch]) -> list[float]:
        losses = []
        for batch in leg:
            self.optimizer.zero_grad()
            loss = self.loss(self.module(torch.from_numpy(batch["input"])), torch.from_numpy(batch["labels"]))
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def handed_over(self, file: Path) -> None:
        onward.from_torch(
            self.module, self.example, loss=self.loss, optimizer=self.optimizer, scheduler=self.scheduler
        ).save(file)


def in_keras(file: Path, after: Path, leg: list[Batch]) -> list[float]:
    model = onward.to_keras(file)
    losses = []
    for batch in leg:
        model.reset_metrics()
        losses.append(float(model.train_on_batch(batch["input"], batch["labels"])))
    onward.from_keras(model).save(after)
    return losses


def in_jax(file: Path, after: Path, leg: list[Batch]) -> list[float]:
    training = onward.to_jax(file)
    step, state = jax.jit(training.step), training.state
    losses = []
    for batch in leg:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    training.training(state).save(after)
    return losses


def in_onnxruntime(file: Path, steps: list[Batch]) -> list[float]:
    with onward.engines.start(onward.load(file)) as engine:
        return [float(engine.step(batch)["loss"]) for batch in steps]


# ---- data ----------------------------------------------------------------------------------------------------------


def digits() -> tuple[np.ndarray, np.ndarray]:
    found = load_digits()
    return found.images[:, None].astype("f") / 16, found.target.astype(np.int64)


def mnist(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    images, labels = idx(folder / "train-images-idx3-ubyte"), idx(folder / "train-labels-idx1-ubyte")
    return images[:, None].astype("f") / 255, labels.astype(np.int64)


def idx(file: Path) -> np.ndarray:
    """MNIST's own format: a magic number whose last byte is the rank, the sizes, the bytes."""
    packed = file.with_name(file.name + ".gz")
    if not (packed.exists() or file.exists()):
        raise SystemExit(f"error: there is neither {file} nor {packed.name}")
    data = gzip.decompress(packed.read_bytes()) if packed.exists() else file.read_bytes()
    rank = data[3]
    sizes = np.frombuffer(data, ">i4", rank, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * rank).reshape(sizes)


def batches(images: np.ndarray, labels: np.ndarray, count: int, seed: int) -> Iterator[Batch]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        rows = rng.choice(len(images), BATCH, replace=False)
        yield {"input": images[rows], "labels": labels[rows]}


if __name__ == "__main__":
    main()
