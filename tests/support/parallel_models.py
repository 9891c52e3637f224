"""Models that are trained by several processes: a CNN with BatchNormalization, a GPT, and an MLP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch_export import by_torchscript, quiet

import onward

WORDS, TIME = 32, 8


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attend(self.before(x)).chunk(3, 2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        mask = torch.tril(torch.ones(TIME, TIME, dtype=torch.bool))
        scores = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(~mask, -1e9)
        x = x + self.merge((scores.softmax(3) @ v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.between(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, is_tied: bool = False):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.randn(TIME, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, 2) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.widen, self.narrow, self.dropout = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.dropout(F.gelu(self.widen(x)), self.dropout, self.dropout > 0))


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 12, 3), nn.BatchNorm2d(12), nn.ReLU(),
        Mean(), nn.Linear(12, 10),
    )  # fmt: skip


RECIPE = {"optimizer": "adamw:lr=3e-3,eps=1e-4", "clip": "norm:1", "accumulate": 2}


def write_cnn(path: Path) -> None:
    model = _export(cnn, {"image": torch.randn(2, 1, 8, 8)})
    onward.prepare(model, loss="cross_entropy", variance="sample", **RECIPE).save(path)


def write_gpt(path: Path, layers: int = 3, width: int = 16, is_tied: bool = False) -> None:
    model = _export(lambda: Gpt(layers, width, is_tied), {"tokens": torch.zeros(2, TIME, dtype=torch.int64)})
    onward.prepare(model, loss="cross_entropy:axis=-1,ignore_index=-100", **RECIPE).save(path)


def write_mlp(path: Path, layers: int = 4, dropout: float = 0.0) -> None:
    model = _export(
        lambda: nn.Sequential(*(Residual(8, dropout) for _ in range(layers)), nn.Linear(8, 3)), {"x": torch.randn(2, 8)}
    )
    for node in model.graph.node:
        if node.op_type == "Dropout":
            del node.input[2]  # which says that it always drops
    onward.prepare(model, loss=["mse", "l1:scale=0.5"], **RECIPE).save(path)


def _export(make: Callable[[], nn.Module], inputs: dict[str, torch.Tensor]) -> Any:
    torch.manual_seed(0)
    with quiet():
        return by_torchscript(make().eval(), inputs, dict.fromkeys(inputs, "n"), "logits")


def batches(model: onward.Model, count: int, size: int = 12) -> list[dict[str, np.ndarray]]:
    """Some are smaller than others, and one than any number of processes."""
    rng = np.random.default_rng(0)
    sizes = [1 if i % 10 == 9 else 7 if i % 3 == 2 else size for i in range(count)]
    return [_DRAWN[model.inputs[0].name](rng, n) for n in sizes]


def _images(rng: np.random.Generator, n: int) -> dict[str, Any]:
    return {"image": rng.normal(1, 2, (n, 1, 8, 8)).astype(np.float32), "labels": rng.integers(0, 10, n)}


def _text(rng: np.random.Generator, n: int) -> dict[str, Any]:
    tokens = rng.integers(0, WORDS, (n, TIME))
    labels = np.where(np.arange(n)[:, None] % 3 + np.arange(TIME) > 6, -100, (tokens * 3 + 1) % WORDS)
    return {"tokens": tokens, "labels": labels}


def _amounts(rng: np.random.Generator, n: int) -> dict[str, Any]:
    x = rng.normal(0, 1, (n, 8)).astype(np.float32)
    return {"x": x, "target": np.sin(x[:, :3]), "logits_target": np.cos(x[:, :3])}


_DRAWN = {"image": _images, "tokens": _text, "x": _amounts}


ROOT_OF_MEAN = """
    <domain: "mine", opset_import: ["": 21]>
    RootOfMean (x, target) => (loss) {
        difference = Sub(x, target)
        square = Mul(difference, difference)
        mean = ReduceMean<keepdims=0>(square)
        loss = Sqrt(mean)
    }"""


def write_both(folder: Path) -> dict[str, str]:
    """Where the CNN and the GPT are."""
    write_cnn(folder / "cnn.onnx")
    write_gpt(folder / "gpt.onnx")
    return {name: str(folder / f"{name}.onnx") for name in ("cnn", "gpt")}
