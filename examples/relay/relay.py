"""Start a run in PyTorch, continue it in Keras, finish it in JAX; and repeat all of it in ONNX Runtime.

    make relay

A convolutional network learns scikit-learn's digits. PyTorch makes the first third of the steps,
with a module, an optimizer and a scheduler of PyTorch. It hands over one ONNX file with weights,
moments, schedule and progress. Keras continues with this file, then JAX with optax. ONNX Runtime
and PyTorch also make all steps from the start. The curves match. Files, losses and a plot are in
examples/relay/out/.

To train on MNIST, pass a folder with its IDX files (.gz or not):

    python examples/relay/relay.py --mnist FOLDER
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
    parser.add_argument(
        "--mnist", type=Path, help="folder with train-images-idx3-ubyte[.gz] and train-labels-idx1-ubyte[.gz]"
    )
    parser.add_argument("--leg", type=int, default=LEG, help=f"steps in each framework (default: {LEG})")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder for the results (default: {OUT})")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    images, labels = mnist(args.mnist) if args.mnist else digits()
    legs = [list(batches(images, labels, args.leg, seed)) for seed in range(3)]
    all_batches = [batch for leg in legs for batch in leg]

    runner = Native(images.shape[-1])
    runner.save(args.out / "0-start.onnx")
    first = runner.train(legs[0])
    runner.save(args.out / "1-from-pytorch.onnx")
    alone = first + runner.train(legs[1] + legs[2])
    curves = {
        "PyTorch": (0, first),
        "Keras": (args.leg, in_keras(args.out / "1-from-pytorch.onnx", args.out / "2-from-keras.onnx", legs[1])),
        "JAX": (2 * args.leg, in_jax(args.out / "2-from-keras.onnx", args.out / "3-from-jax.onnx", legs[2])),
        "ONNX Runtime": (0, in_onnxruntime(args.out / "0-start.onnx", all_batches)),
    }
    for name, (start, losses) in curves.items():
        difference = max(abs(a - b) / b for a, b in zip(losses, alone[start:], strict=False))
        print(f"{name:13} steps {start:3} to {start + len(losses):3}: difference from PyTorch alone {difference:.1e}")
    (args.out / "losses.json").write_text(json.dumps({name: losses for name, (_, losses) in curves.items()}))
    draw(curves, args.out / "relay.svg")
    print(f"wrote {args.out / 'relay.svg'}")


# ---- frameworks ------------------------------------------------------------------------------------------------------


class Native:
    """A training loop in plain PyTorch."""

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

    def save(self, file: Path) -> None:
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


# ---- data ------------------------------------------------------------------------------------------------------------


def digits() -> tuple[np.ndarray, np.ndarray]:
    bunch = load_digits()
    return bunch.images[:, None].astype("f") / 16, bunch.target.astype(np.int64)


def mnist(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    images, labels = idx(folder / "train-images-idx3-ubyte"), idx(folder / "train-labels-idx1-ubyte")
    return images[:, None].astype("f") / 255, labels.astype(np.int64)


def idx(file: Path) -> np.ndarray:
    """Read an IDX file: a magic number whose last byte is the rank, sizes, bytes."""
    packed = file.with_name(file.name + ".gz")
    if not (packed.exists() or file.exists()):
        raise SystemExit(f"error: no {file} or {packed.name}")
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
