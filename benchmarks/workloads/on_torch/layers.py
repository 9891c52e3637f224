"""Small classifiers in PyTorch, with layers that the other models lack."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from workloads.architectures import CLASSES, GPT, ITEMS, WORDS


class Classified(nn.Module):
    """A model of images or signals with a classifier over the mean of each channel."""

    def __init__(self, body: nn.Module, channels: int, model: str) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(channels, CLASSES[model])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).flatten(2).mean(2))


def _normal(convolution: nn.Module, channels: int, activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), activation)


class UNet(nn.Module):
    """A U-Net of four levels; `enlarge(channels)` doubles sizes and halves channels."""

    def __init__(self, enlarge: Callable[[int], nn.Module]) -> None:
        super().__init__()
        channels = (3, 16, 32, 64, 128)
        self.down = nn.ModuleList(self._twice(a, b) for a, b in itertools.pairwise(channels))
        self.enlarge = nn.ModuleList(enlarge(n) for n in channels[:1:-1])
        self.up = nn.ModuleList(self._twice(n, n // 2) for n in channels[:1:-1])

    @staticmethod
    def _twice(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(*(_normal(nn.Conv2d(n, b, 3, padding=1), b, nn.ReLU()) for n in (a, b)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level in self.down:
            x = level(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        for enlarge, level, other in zip(self.enlarge, self.up, skips[-2::-1], strict=True):
            x = level(torch.cat([enlarge(x), other], 1))
        return x


def transposed_unet() -> nn.Module:
    return Classified(UNet(lambda n: nn.ConvTranspose2d(n, n // 2, 2, 2)), 16, "unet")


def resized_unet() -> nn.Module:
    def enlarge(n: int) -> nn.Module:
        return nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(n, n // 2, 1))

    return Classified(UNet(enlarge), 16, "resized_unet")


def generator() -> nn.Module:
    """Return the generator of a GAN: from a vector to an image of 32 x 32 pixels."""
    channels = (128, 128, 64, 32)
    steps = itertools.pairwise(channels)
    first = _normal(nn.ConvTranspose2d(128, 128, 4), 128, nn.ReLU())
    larger = [_normal(nn.ConvTranspose2d(a, b, 4, 2, 1), b, nn.ReLU()) for a, b in steps]
    return Classified(nn.Sequential(first, *larger, nn.Conv2d(32, 3, 3, padding=1), nn.Tanh()), 3, "generator")


class Residual(nn.Module):
    """Layers with a residual connection."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def vocoder() -> nn.Module:
    """Return a vocoder: from 80 bands to a signal 64 times as long."""
    layers: list[nn.Module] = [nn.Conv1d(80, 128, 7, padding=3)]
    for n in (128, 64, 32):
        layers += [nn.LeakyReLU(0.1), nn.ConvTranspose1d(n, n // 2, 8, 4, 2)]
        layers += [Residual(nn.LeakyReLU(0.1), nn.Conv1d(n // 2, n // 2, 3, padding=d, dilation=d)) for d in (1, 3)]
    return Classified(nn.Sequential(*layers, nn.LeakyReLU(0.1)), 16, "vocoder")


def signals() -> nn.Module:
    """Return a CNN of signals."""
    channels, layers = (1, 32, 64, 128), []
    for a, b in itertools.pairwise(channels):
        layers += [nn.Conv1d(a, b, 9, 2, 4), nn.BatchNorm1d(b), nn.ReLU(), nn.MaxPool1d(2)]
    return Classified(nn.Sequential(*layers), 128, "signals")


class Dense(nn.Module):
    """A dense block: each convolution reads the concatenated results of all earlier ones."""

    def __init__(self, channels: int, growth: int, count: int) -> None:
        super().__init__()
        sizes = [channels + growth * i for i in range(count)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(n), nn.ReLU(), nn.Conv2d(n, growth, 3, padding=1)) for n in sizes
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def densenet() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for n in (16, 32):
        layers += [Dense(n, 12, 4), nn.Conv2d(n + 48, 2 * n, 1), nn.AvgPool2d(2)]
    return Classified(nn.Sequential(*layers), 64, "densenet")


class WrittenOut(nn.Module):
    """Layers with GELU as the basic operators that older exporters write."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((192, 768), (768, 192), (192, 768)))
        self.head = nn.Linear(768, CLASSES["written_out"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            weight = (
                torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)) if i % 2 else torch.erf(x / math.sqrt(2))
            )
            x = x * 0.5 * (1 + weight)
        return self.head(x)


class TalkingHeads(nn.Module):
    """Attention with a linear layer across the weights of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(GPT.width, 3 * GPT.width)
        self.mix = nn.Linear(GPT.heads, GPT.heads)
        self.project = nn.Linear(GPT.width, GPT.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        q, k, v = (x.view(n, length, GPT.heads, -1).transpose(1, 2) for x in self.qkv(x).chunk(3, 2))
        weights = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(width // GPT.heads), 3)
        weights = self.mix(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.project((weights @ v).transpose(1, 2).reshape(n, length, width))


def talking_heads() -> nn.Module:
    layers = (Residual(nn.LayerNorm(GPT.width), TalkingHeads()) for _ in range(GPT.layers))
    return nn.Sequential(*layers, nn.Linear(GPT.width, CLASSES["talking_heads"]))


def words() -> nn.Module:
    """Return a model that predicts the next of many words."""
    return nn.Sequential(nn.Embedding(WORDS, 128), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, WORDS))


class Recommender(nn.Module):
    """A model that predicts a class from a list of items."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, 64)
        self.head = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES["recommender"]))

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        return self.head(self.items(items).mean(1))
