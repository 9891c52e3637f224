"""Sizes of the models, for all frameworks."""

from __future__ import annotations

from typing import NamedTuple

CLASSES = {"mlp": 10, "lenet": 10, "resnet8": 10, "resnet18": 1000, "mobilenet": 1000, "vit": 1000, "distilbert": 2}
IMAGES = {"mlp": (784,), "lenet": (1, 28, 28), "resnet8": (3, 32, 32)} | dict.fromkeys(
    ("resnet18", "mobilenet", "vit"), (3, 224, 224)
)
"""Model -> the shape of a sample."""
LAYERS = {
    "unet": (3, 64, 64),
    "resized_unet": (3, 64, 64),
    "generator": (128, 1, 1),
    "vocoder": (80, 64),
    "signals": (1, 8000),
    "densenet": (3, 32, 32),
    "written_out": (192,),
    "talking_heads": (128, 128),
}
"""Model with a rare layer -> the shape of a sample."""
IMAGES |= LAYERS
CLASSES |= dict.fromkeys((*LAYERS, "recommender"), 10)
WORDS = 30_000
ITEMS = 100_000
CONVOLUTIONAL = {"lenet", "resnet8", "resnet18", "mobilenet"}


class ResNet(NamedTuple):
    stem: int
    """Size of the first kernel. A large one halves the image, and a pool after it halves it again."""
    stages: tuple[tuple[int, int], ...]
    """Channels and blocks of each stage. All but the first halve the image."""


RESNETS = {
    "resnet8": ResNet(3, ((16, 1), (32, 1), (64, 1))),
    "resnet18": ResNet(7, ((64, 2), (128, 2), (256, 2), (512, 2))),
}


class Transformer(NamedTuple):
    width: int
    heads: int
    layers: int
    length: int
    vocabulary: int = 0


GPT = Transformer(128, 4, 4, 128, 256)
VIT = Transformer(192, 3, 12, 1 + (224 // 16) ** 2)
"""Its length is a class token and one token per patch."""
PATCH = 16
DISTILBERT = Transformer(768, 12, 6, 128, 30522)
POSITIONS = 512
"""Positions for which DistilBERT has weights."""


class Tagger(NamedTuple):
    vocabulary: int
    embedding: int
    hidden: int
    tags: int
    length: int


TAGGER = Tagger(10_000, 128, 256, 17, 64)


class Inverted(NamedTuple):
    """An inverted residual block of MobileNetV3: wide in the middle, with a depthwise convolution."""

    kernel: int
    wide: int
    after: int
    squeezes: bool
    hard_swish: bool
    stride: int


MOBILENET = (
    Inverted(3, 16, 16, False, False, 1),
    Inverted(3, 64, 24, False, False, 2),
    Inverted(3, 72, 24, False, False, 1),
    Inverted(5, 72, 40, True, False, 2),
    Inverted(5, 120, 40, True, False, 1),
    Inverted(5, 120, 40, True, False, 1),
    Inverted(3, 240, 80, False, True, 2),
    Inverted(3, 200, 80, False, True, 1),
    Inverted(3, 184, 80, False, True, 1),
    Inverted(3, 184, 80, False, True, 1),
    Inverted(3, 480, 112, True, True, 1),
    Inverted(3, 672, 112, True, True, 1),
    Inverted(5, 672, 160, True, True, 2),
    Inverted(5, 960, 160, True, True, 1),
    Inverted(5, 960, 160, True, True, 1),
)
"""Blocks of MobileNetV3-large, between a stem of 16 channels and a head with 960 channels and a hidden layer."""
STEM, LAST, HIDDEN = 16, 960, 1280


def squeezed(channels: int) -> int:
    """Return the squeezed channels of a block: a quarter, rounded to a multiple of 8, at least 90% of it."""
    near = max(8, (channels + 16) // 32 * 8)
    return near + 8 if near < 0.9 * channels / 4 else near


class Adapters(NamedTuple):
    """Low-rank adapters of a model whose other weights are frozen."""

    rank: int
    alpha: float
    targets: str
    """Pattern of the layers with an adapter."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


LORA = Adapters(8, 16.0, "*.attention.*")
"""Adapters of DistilBERT."""
