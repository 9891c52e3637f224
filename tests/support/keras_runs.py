"""What the tests of Keras share: runs of Keras, and whether a training model goes on as they do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from onward.engines import start
from onward.frameworks.keras import from_keras

layers = keras.layers
Batch = tuple[Any, Any]


class Run(NamedTuple):
    """A compiled model, and batches for it."""

    model: Any
    batches: Iterator[Batch]


def real(*shape: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, n: rng.normal(size=(n, *shape)).astype(np.float32)


def positive(*shape: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, n: (rng.random((n, *shape)) + 0.2).astype(np.float32)


def whole(below: int, *shape: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, n: rng.integers(0, below, (n, *shape))


def binary(*shape: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, n: rng.integers(0, 2, (n, *shape)).astype(np.float32)


def one_hot(classes: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, n: np.eye(classes, dtype=np.float32)[rng.integers(0, classes, n)]


def batches(inputs: Any, targets: Any, *, samples: int = 8, seed: int = 0) -> Iterator[Batch]:
    """Endless; several inputs or targets are lists."""
    rng = np.random.default_rng(seed)

    def drawn(given: Any) -> Any:
        return [draw(rng, samples) for draw in given] if isinstance(given, list) else given(rng, samples)

    while True:
        yield drawn(inputs), drawn(targets)


def step(model: Any, batch: Batch) -> float:
    """One step of Keras, operator by operator: to compile it takes longer than the few steps that tests make."""
    model.run_eagerly = True
    model.reset_metrics()
    return float(model.train_on_batch(*batch, return_dict=True)["loss"])


def named(inputs: Any, batch: Batch) -> dict[str, np.ndarray]:
    """A batch of Keras for an engine whose inputs have these names."""
    flat = [array for part in batch for array in (part if isinstance(part, list) else [part])]
    return dict(zip(inputs, flat, strict=True))


def on_backend(backend: str, *arguments: str, folder: Path | None = None) -> None:
    """Run Python in a process on a backend of Keras, with the files of this folder."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def goes_on(run: Run, *, before: int = 2, steps: int = 5, within: float = 1e-5, **options: Any) -> Any:
    """Let Keras make some steps, convert, and let both make the same further steps. Returns the training model."""
    for _ in range(before):
        step(run.model, next(run.batches))
    training = from_keras(run.model, **options)
    agree(training, run.model, run.batches, steps=steps, within=within)
    return training


def agree(training: Any, model: Any, data: Iterator[Batch], *, steps: int = 5, within: float = 1e-5) -> None:
    """ONNX Runtime and Keras have the same losses."""
    with start(training, threads=1) as engine:
        for _ in range(steps):
            batch = next(data)
            expected = step(model, batch)
            found = float(engine.step(named(engine.inputs, batch))["loss"])
            np.testing.assert_allclose(found, expected, rtol=within, atol=1e-7)


def mlp(optimizer: Any = "sgd", loss: Any = "mse", *, target: Any = None, outputs: int = 3, last: Any = None) -> Run:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [layers.Input((5,), name="x"), layers.Dense(6, "tanh", name="hidden"), layers.Dense(outputs, last, name="out")],
        name="mlp",
    )
    model.compile(optimizer, loss)
    return Run(model, batches(real(5), target or real(outputs)))
