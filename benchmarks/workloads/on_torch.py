"""The workloads in PyTorch. The same modules are exported to ONNX, and all others start from their weights.

python -m workloads.on_torch WORKLOAD FOLDER         # writes both
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from workloads import (
    CLASSES,
    HEADS,
    LAYERS,
    LENGTH,
    MODEL,
    THREADS,
    VOCABULARY,
    WEIGHTS,
    WIDTH,
    WORKLOADS,
    Step,
    Workload,
)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 512)
        self.fc2 = nn.Linear(512, 256)
        self.fc3 = nn.Linear(256, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.changes = before != after
        if self.changes:
            self.conv3 = nn.Conv2d(before, after, 1, stride, bias=False)
            self.norm3 = nn.BatchNorm2d(after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        around = self.norm3(self.conv3(x)) if self.changes else x
        return F.relu(self.norm2(self.conv2(y)) + around)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.block1 = Block(16, 16, 1)
        self.block2 = Block(16, 32, 2)
        self.block3 = Block(32, 64, 2)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)))
        x = self.block3(self.block2(self.block1(x)))
        return self.head(x.mean((2, 3)))


class Layer(nn.Module):
    """Attention, then an MLP, each behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.project(self.attend(self.norm1(x)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        n, length, _ = x.shape
        q, k, v = (part.view(n, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).split(WIDTH, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(n, length, WIDTH)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.empty(LENGTH, WIDTH).normal_(std=0.02))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


MODELS = {"mlp": MLP, "lenet": LeNet, "resnet": ResNet, "gpt": GPT}
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def load(workload: Workload, folder: Path, *, fused: bool | None = None, compiled: bool = False) -> Step:
    torch.set_num_threads(THREADS)
    module = MODELS[workload.model]()
    load_weights(module, folder)
    optimizer = OPTIMIZERS[workload.optimizer](module.parameters(), fused=fused, **workload.rates)

    def update(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        logits = module(x)
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    if compiled:
        update = torch.compile(update)
    return lambda x, labels: update(torch.from_numpy(x), torch.from_numpy(labels)).item()


def load_weights(module: nn.Module, folder: Path) -> None:
    with np.load(folder / WEIGHTS) as weights:
        module.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})


def export(workload: Workload, folder: Path) -> None:
    """Write the weights to start from, and the model with them as an ONNX file.

    Unoptimized: the exporter would fold normalizations into convolutions, and that is another model to train.
    """
    torch.manual_seed(0)
    module = MODELS[workload.model]().eval()
    with torch.no_grad():  # it also takes equal tensors, such as biases that are all 0, for one
        for parameter in module.parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter))
    np.savez(folder / WEIGHTS, **{name: value.numpy() for name, value in module.state_dict().items()})
    example = torch.from_numpy(workload.batches()[0][0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.onnx.export(
            module, (example,), folder / MODEL, input_names=["x"], output_names=["logits"],
            dynamo=True, verbose=False, optimize=False,
        )  # fmt: skip
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    export(WORKLOADS[sys.argv[1]], Path(sys.argv[2]))
