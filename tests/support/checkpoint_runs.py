"""Small runs of PyTorch whose checkpoints are read, written and gone on with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import onward

BATCHES, SIZE = 15, 16


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.random((BATCHES, SIZE, 4), np.float32), rng.integers(0, 3, (BATCHES, SIZE))


def net() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def lightning_module(configured: Callable[[Any], Any]) -> Any:
    """A LightningModule around `net` that remembers its losses; `configured` makes optimizers of its parameters."""
    import pytorch_lightning
    import torch

    class Module(pytorch_lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, width: int = 8):
            super().__init__()
            self.save_hyperparameters()
            self.model = net()
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            loss = torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return configured(self.parameters())

    return Module()


def steps(module: Any, optimizer: Any, scheduler: Any, span: range) -> list[float]:
    """The losses of some batches, with which a module is trained."""
    import torch

    inputs, labels = (torch.from_numpy(array) for array in data())
    losses = []
    for i in span:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(inputs[i]), labels[i])
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def steps_of_onward(model: onward.Model, span: range) -> tuple[list[float], onward.Model]:
    """The same on ONNX Runtime, and the training model after them."""
    running = onward.engines.start(model)
    inputs, labels = data()
    source, target = model.inputs[0].name or "", model.step().algorithm.inputs[0].name or ""
    losses = [float(running.step({source: inputs[i], target: labels[i]})["loss"]) for i in span]
    return losses, running.updated()


def exported(folder: Path, module: Callable[[], Any] = net) -> onward.Model:
    """The module as an inference model."""
    import torch

    path = folder / "model.onnx"
    example = torch.zeros(SIZE, 4)
    torch.onnx.export(
        module().eval(), (example,), path, dynamo=True, optimize=False, dynamic_shapes=({0: "n"},), verbose=False
    )
    return onward.load(path)


def same_tree(ours: Any, theirs: Any, way: str = "") -> None:
    """Two trees of PyTorch are the same, bit for bit."""
    import torch

    assert type(ours) is type(theirs), way
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs), way
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), way
        for key in ours:
            same_tree(ours[key], theirs[key], f"{way}/{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), way
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            same_tree(one, other, f"{way}/{at}")
    elif isinstance(ours, np.ndarray):
        assert np.array_equal(ours, theirs), way
    else:
        assert ours == theirs, way


def close(ours: Sequence[float], theirs: Sequence[float], tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=tolerance)
