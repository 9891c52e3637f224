"""Small models of families that repeat their layers: those of transformers, and CNNs in the manner of torchvision.

A family is a function that makes a module and its inputs, and how many layers it has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch_export import by_dynamo, by_torchscript, quiet


class Family(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    layers: int


# ---- transformers ----------------------------------------------------------------------------------------------------


class Flat(nn.Module):
    """A model of transformers as a function of tensors, to the first tensor that it returns."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]):
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, inputs, strict=True)))[0]


SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
WORDS = {"vocab_size": 30, "max_position_embeddings": 16}
GROUPED = {**SIZES, **WORDS, "num_key_value_heads": 1, "use_cache": False}


def _tokens() -> torch.Tensor:
    return torch.randint(0, 30, (2, 6))


def _masked() -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(), "attention_mask": torch.ones(2, 6, dtype=torch.int64)}


def hugging(kind: str, options: dict[str, Any], inputs: Callable[[], dict[str, torch.Tensor]], layers: int) -> Family:
    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, kind)
        return Flat(made(made.config_class(**options)), tuple(inputs())).eval()

    return Family(make, inputs, layers)


def _causal() -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens()}


def _pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 8, 8)}


T5 = {"vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2, "use_cache": False}
WHISPER = {"d_model": 16, "num_mel_bins": 4, "max_source_positions": 6, "encoder_layers": 4} | {
    "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_layers": 3, "decoder_attention_heads": 2,
    "decoder_ffn_dim": 24, "vocab_size": 30, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False,
}  # fmt: skip

TRANSFORMERS = {
    "bert": hugging("BertForSequenceClassification", {**SIZES, **WORDS}, _masked, 4),
    "roberta": hugging("RobertaForMaskedLM", {**SIZES, **WORDS, "pad_token_id": 0}, _masked, 4),
    "distilbert": hugging(
        "DistilBertModel", {**WORDS, "dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 24}, _masked, 3
    ),
    "gpt2": hugging(
        "GPT2LMHeadModel",
        {"vocab_size": 30, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2, "use_cache": False},
        _causal,
        4,
    ),
    "llama": hugging("LlamaForCausalLM", GROUPED, _causal, 4),
    "mistral": hugging("MistralForCausalLM", {**GROUPED, "sliding_window": 4}, _causal, 4),
    "qwen2": hugging("Qwen2ForCausalLM", GROUPED, _causal, 4),
    "t5": hugging(
        "T5ForConditionalGeneration", T5, lambda: {"input_ids": _tokens(), "decoder_input_ids": _tokens()}, 6
    ),
    "vit": hugging("ViTForImageClassification", {**SIZES, "image_size": 8, "patch_size": 4}, _pixels, 4),
    "whisper": hugging(
        "WhisperForConditionalGeneration",
        WHISPER,
        lambda: {"input_features": torch.randn(2, 4, 12), "decoder_input_ids": _tokens()},
        7,
    ),
    "albert": hugging("AlbertModel", {**SIZES, **WORDS, "embedding_size": 8}, _masked, 4),
    "gemma2": hugging("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4}, _causal, 4),
}


# ---- convolutions ----------------------------------------------------------------------------------------------------


def _conv(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: type[nn.Module] | None = nn.ReLU
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), *([act()] if act else []))


class Basic(nn.Module):
    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _conv(inputs, width, 1, stride, act=None) if stride > 1 or inputs != width else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    expansion = 2

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _conv(inputs, outputs, 1, stride, act=None) if stride > 1 or inputs != outputs else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(y)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, block: type[Basic] | type[Bottleneck], counts: tuple[int, ...]):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        width = 8
        for i, count in enumerate(counts):
            layers = []
            for k in range(count):
                layers.append(block(width, 8 << i, 2 if i and not k else 1))
                width = (8 << i) * block.expansion
            setattr(self, f"layer{i + 1}", nn.Sequential(*layers))
        self.stages = len(counts)
        self.fc = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for i in range(self.stages):
            x = getattr(self, f"layer{i + 1}")(x)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Squeeze(nn.Module):
    def __init__(self, width: int, act: type[nn.Module], gate: type[nn.Module]):
        super().__init__()
        self.fc1 = nn.Conv2d(width, 4, 1)
        self.fc2 = nn.Conv2d(4, width, 1)
        self.act, self.gate = act(), gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(self.fc2(self.act(self.fc1(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    """Of MobileNet and EfficientNet: wider, by depth, squeezed, narrower, and the input if that fits."""

    def __init__(
        self, inputs: int, outputs: int, expand: int, stride: int, kernel: int = 3,
        act: type[nn.Module] = nn.ReLU6, squeeze: type[nn.Module] | None = None,
    ):  # fmt: skip
        super().__init__()
        width = inputs * expand
        layers = [_conv(inputs, width, 1, act=act)] if expand > 1 else []
        layers.append(_conv(width, width, kernel, stride, width, act))
        if squeeze:
            layers.append(Squeeze(width, nn.ReLU if act is not nn.SiLU else nn.SiLU, squeeze))
        self.conv = nn.Sequential(*layers, _conv(width, outputs, 1, act=None))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.adds else self.conv(x)


class Features(nn.Module):
    """All layers in one Sequential, then a classifier."""

    def __init__(self, features: nn.Sequential, width: int):
        super().__init__()
        self.features = features
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(width, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(self.features(x), 1), 1))


def mobilenet_v2() -> nn.Module:
    """Expansion, width, how many, stride."""
    layers, width = [_conv(3, 8, 3, 2, act=nn.ReLU6)], 8
    for expand, outputs, count, stride in ((1, 8, 1, 1), (6, 12, 2, 2), (6, 16, 3, 2), (6, 20, 2, 1)):
        for k in range(count):
            layers.append(Inverted(width, outputs, expand, stride if not k else 1))
            width = outputs
    layers.append(_conv(width, 40, 1, act=nn.ReLU6))
    return Features(nn.Sequential(*layers), 40)


def mobilenet_v3() -> nn.Module:
    """Small: kernel, expansion, width, squeeze, activation, stride."""
    rows = (
        (3, 1, 8, True, nn.ReLU, 2), (3, 4, 12, False, nn.ReLU, 2), (3, 3, 12, False, nn.ReLU, 1),
        (5, 4, 16, True, nn.Hardswish, 2), (5, 6, 16, True, nn.Hardswish, 1), (5, 6, 16, True, nn.Hardswish, 1),
        (5, 3, 20, True, nn.Hardswish, 1), (5, 3, 20, True, nn.Hardswish, 1),
    )  # fmt: skip
    layers, width = [_conv(3, 8, 3, 2, act=nn.Hardswish)], 8
    for kernel, expand, outputs, squeezes, act, stride in rows:
        layers.append(Inverted(width, outputs, expand, stride, kernel, act, nn.Hardsigmoid if squeezes else None))
        width = outputs
    layers.append(_conv(width, 40, 1, act=nn.Hardswish))
    return Features(nn.Sequential(*layers), 40)


def efficientnet() -> nn.Module:
    layers, width = [_conv(3, 8, 3, 2, act=nn.SiLU)], 8
    for expand, outputs, count, stride, kernel in (
        (1, 8, 1, 1, 3),
        (6, 12, 2, 2, 3),
        (6, 16, 2, 2, 5),
        (6, 20, 3, 2, 3),
    ):
        stage = []
        for k in range(count):
            stage.append(Inverted(width, outputs, expand, stride if not k else 1, kernel, nn.SiLU, nn.Sigmoid))
            width = outputs
        layers.append(nn.Sequential(*stage))
    layers.append(_conv(width, 40, 1, act=nn.SiLU))
    return Features(nn.Sequential(*layers), 40)


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, found: list[torch.Tensor]) -> torch.Tensor:
        x = self.conv1(F.relu(self.norm1(torch.cat(found, 1))))
        return self.conv2(F.relu(self.norm2(x)))


class DenseBlock(nn.ModuleDict):
    def __init__(self, count: int, inputs: int, growth: int):
        super().__init__()
        for k in range(count):
            self.add_module(f"denselayer{k + 1}", DenseLayer(inputs + k * growth, growth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [x]
        for layer in self.values():
            found.append(layer(found))
        return torch.cat(found, 1)


def densenet() -> nn.Module:
    features, width = nn.Sequential(), 8
    features.add_module("conv0", nn.Conv2d(3, width, 7, 2, 3, bias=False))
    features.add_module("norm0", nn.BatchNorm2d(width))
    features.add_module("relu0", nn.ReLU())
    for i, count in enumerate((3, 4, 3)):
        features.add_module(f"denseblock{i + 1}", DenseBlock(count, width, 4))
        width += count * 4
        if i < 2:
            transition = nn.Sequential()
            transition.add_module("norm", nn.BatchNorm2d(width))
            transition.add_module("relu", nn.ReLU())
            transition.add_module("conv", nn.Conv2d(width, width // 2, 1, bias=False))
            transition.add_module("pool", nn.AvgPool2d(2, 2))
            features.add_module(f"transition{i + 1}", transition)
            width //= 2
    features.add_module("norm5", nn.BatchNorm2d(width))
    features.add_module("relu5", nn.ReLU())
    return Features(features, width)


class Norm2d(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class NextBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.depth = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        return x + self.scale * self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    layers: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, 8, 4, 4), Norm2d(8))]
    for i, count in enumerate((2, 3, 2)):
        if i:
            layers.append(nn.Sequential(Norm2d(4 << i), nn.Conv2d(4 << i, 8 << i, 2, 2)))
        layers.append(nn.Sequential(*(NextBlock(8 << i) for _ in range(count))))
    return Features(nn.Sequential(*layers), 32)


def _images() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 3, 32, 32)}


def _cnn(make: Callable[..., nn.Module], layers: int, *arguments: Any) -> Family:
    return Family(lambda: make(*arguments).eval(), _images, layers)


CNNS = {
    "resnet_basic": _cnn(ResNet, 8, Basic, (2, 2, 2, 2)),
    "resnet_bottleneck": _cnn(ResNet, 9, Bottleneck, (2, 2, 3, 2)),
    "mobilenet_v2": _cnn(mobilenet_v2, 8),
    "mobilenet_v3": _cnn(mobilenet_v3, 8),
    "efficientnet": _cnn(efficientnet, 8),
    "densenet": _cnn(densenet, 10),
    "convnext": _cnn(convnext, 7),
}

FAMILIES = {**TRANSFORMERS, **CNNS}


def export(family: Family, exporter: str) -> Any:
    """A model as one of PyTorch's exporters writes it; the first axis of its inputs may vary."""
    torch.manual_seed(0)
    inputs = family.inputs()
    with quiet(), torch.no_grad():
        write = by_dynamo if exporter == "dynamo" else by_torchscript
        return write(family.make(), inputs, dict.fromkeys(inputs, "n"), "y")


@functools.cache
def exported(name: str, exporter: str) -> Any:
    return export(FAMILIES[name], exporter)
