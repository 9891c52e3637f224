"""The sizes of the models, said once for all frameworks."""

from __future__ import annotations

from typing import NamedTuple

CLASSES = {"mlp": 10, "lenet": 10, "resnet8": 10, "resnet18": 1000, "mobilenet": 1000, "vit": 1000, "distilbert": 2}
IMAGES = {"mlp": (784,), "lenet": (1, 28, 28), "resnet8": (3, 32, 32)} | dict.fromkeys(
    ("resnet18", "mobilenet", "vit"), (3, 224, 224)
)
"""The shape of one."""
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
"""What one input of the models of single layers is like."""
IMAGES |= LAYERS
CLASSES |= dict.fromkeys((*LAYERS, "recommender"), 10)
WORDS = 30_000
ITEMS = 100_000
CONVOLUTIONAL = {"lenet", "resnet8", "resnet18", "mobilenet"}


class ResNet(NamedTuple):
    stem: int
    """The size of the first kernel. A large one halves the image, and is followed by a pool that halves it again."""
    stages: tuple[tuple[int, int], ...]
    """Channels and blocks of each; all but the first halve the image."""


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
"""A token that gathers what is known, and one for each patch."""
PATCH = 16
DISTILBERT = Transformer(768, 12, 6, 128, 30522)
POSITIONS = 512
"""Those that DistilBERT has weights for."""


class Tagger(NamedTuple):
    vocabulary: int
    embedding: int
    hidden: int
    tags: int
    length: int


TAGGER = Tagger(10_000, 128, 256, 17, 64)


class Inverted(NamedTuple):
    """A block of MobileNetV3: wide in the middle, where each channel has a kernel of its own."""

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
"""MobileNetV3-large: 16 channels before, then 960 and a hidden layer."""
STEM, LAST, HIDDEN = 16, 960, 1280


def squeezed(channels: int) -> int:
    """How many channels the gate of a block works with: a quarter, as a multiple of 8 that is not much less."""
    near = max(8, (channels + 16) // 32 * 8)
    return near + 8 if near < 0.9 * channels / 4 else near


class Adapters(NamedTuple):
    """Low-rank adapters, which are trained alone."""

    rank: int
    alpha: float
    targets: str
    """A pattern of the layers that get one."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


LORA = Adapters(8, 16.0, "*.attention.*")
"""Of DistilBERT."""
