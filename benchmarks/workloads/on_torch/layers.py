"""Small models in PyTorch with layers that the others do not have. Each ends in classes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from workloads.architectures import CLASSES, GPT, ITEMS, WORDS


class Classified(nn.Module):
    """What a model makes of a picture or a signal, by the mean of each channel."""

    def __init__(self, body: nn.Module, channels: int, model: str) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(channels, CLASSES[model])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).flatten(2).mean(2))


def _normal(convolution: nn.Module, channels: int, activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), activation)


class UNet(nn.Module):
    """Down in four steps, and up again beside what was there; `enlarge(channels)` doubles sizes and halves channels."""

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
        beside = []
        for level in self.down:
            x = level(F.max_pool2d(x, 2) if beside else x)
            beside.append(x)
        for enlarge, level, other in zip(self.enlarge, self.up, beside[-2::-1], strict=True):
            x = level(torch.cat([enlarge(x), other], 1))
        return x


def transposed_unet() -> nn.Module:
    return Classified(UNet(lambda n: nn.ConvTranspose2d(n, n // 2, 2, 2)), 16, "unet")


def resized_unet() -> nn.Module:
    def enlarge(n: int) -> nn.Module:
        return nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(n, n // 2, 1))

    return Classified(UNet(enlarge), 16, "resized_unet")


def generator() -> nn.Module:
    """Of a GAN: from a vector to an image of 32 x 32."""
    channels = (128, 128, 64, 32)
    steps = itertools.pairwise(channels)
    first = _normal(nn.ConvTranspose2d(128, 128, 4), 128, nn.ReLU())
    larger = [_normal(nn.ConvTranspose2d(a, b, 4, 2, 1), b, nn.ReLU()) for a, b in steps]
    return Classified(nn.Sequential(first, *larger, nn.Conv2d(32, 3, 3, padding=1), nn.Tanh()), 3, "generator")


class Around(nn.Module):
    """What a part makes of x is added to it."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.part = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.part(x)


def vocoder() -> nn.Module:
    """From 80 bands to a signal 64 times as long."""
    parts: list[nn.Module] = [nn.Conv1d(80, 128, 7, padding=3)]
    for n in (128, 64, 32):
        parts += [nn.LeakyReLU(0.1), nn.ConvTranspose1d(n, n // 2, 8, 4, 2)]
        parts += [Around(nn.LeakyReLU(0.1), nn.Conv1d(n // 2, n // 2, 3, padding=d, dilation=d)) for d in (1, 3)]
    return Classified(nn.Sequential(*parts, nn.LeakyReLU(0.1)), 16, "vocoder")


def signals() -> nn.Module:
    """A CNN of signals."""
    channels, parts = (1, 32, 64, 128), []
    for a, b in itertools.pairwise(channels):
        parts += [nn.Conv1d(a, b, 9, 2, 4), nn.BatchNorm1d(b), nn.ReLU(), nn.MaxPool1d(2)]
    return Classified(nn.Sequential(*parts), 128, "signals")


class Dense(nn.Module):
    """Convolutions that read all before them, whose results are put side by side."""

    def __init__(self, channels: int, growth: int, count: int) -> None:
        super().__init__()
        sizes = [channels + growth * i for i in range(count)]
        self.parts = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(n), nn.ReLU(), nn.Conv2d(n, growth, 3, padding=1)) for n in sizes
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.cat([x, part(x)], 1)
        return x


def densenet() -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for n in (16, 32):
        parts += [Dense(n, 12, 4), nn.Conv2d(n + 48, 2 * n, 1), nn.AvgPool2d(2)]
    return Classified(nn.Sequential(*parts), 64, "densenet")


class WrittenOut(nn.Module):
    """Layers with GELU in the parts that older exporters write."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((192, 768), (768, 192), (192, 768)))
        self.head = nn.Linear(768, CLASSES["written_out"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            share = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)) if i % 2 else torch.erf(x / math.sqrt(2))
            x = x * 0.5 * (1 + share)
        return self.head(x)


class TalkingHeads(nn.Module):
    """Attention whose weights are mixed among heads before they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(GPT.width, 3 * GPT.width)
        self.mix = nn.Linear(GPT.heads, GPT.heads)
        self.project = nn.Linear(GPT.width, GPT.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        q, k, v = (part.view(n, length, GPT.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        weights = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(width // GPT.heads), 3)
        weights = self.mix(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.project((weights @ v).transpose(1, 2).reshape(n, length, width))


def talking_heads() -> nn.Module:
    layers = (Around(nn.LayerNorm(GPT.width), TalkingHeads()) for _ in range(GPT.layers))
    return nn.Sequential(*layers, nn.Linear(GPT.width, CLASSES["talking_heads"]))


def words() -> nn.Module:
    """Which of many words is next."""
    return nn.Sequential(nn.Embedding(WORDS, 128), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, WORDS))


class Recommender(nn.Module):
    """What somebody has bought says which kind comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, 64)
        self.head = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES["recommender"]))

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        return self.head(self.items(items).mean(1))
