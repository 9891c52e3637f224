"""The workloads in PyTorch. The same modules are exported to ONNX, and all contenders start from their weights."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from workloads import WEIGHTS, Step, Workload
from workloads.architectures import Adapters
from workloads.on_torch import layers
from workloads.on_torch.images import MLP, LeNet, MobileNet, ResNet
from workloads.on_torch.sequences import Adapted, LanguageModel, Tagger, TextClassifier, VisionTransformer

MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": MLP,
    "lenet": LeNet,
    "resnet8": partial(ResNet, "resnet8"),
    "resnet18": partial(ResNet, "resnet18"),
    "mobilenet": MobileNet,
    "gpt": LanguageModel,
    "vit": VisionTransformer,
    "distilbert": TextClassifier,
    "tagger": Tagger,
    "unet": layers.transposed_unet,
    "resized_unet": layers.resized_unet,
    "generator": layers.generator,
    "vocoder": layers.vocoder,
    "signals": layers.signals,
    "densenet": layers.densenet,
    "written_out": layers.WrittenOut,
    "talking_heads": layers.talking_heads,
    "words": layers.words,
    "recommender": layers.Recommender,
}
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def load(
    workload: Workload,
    folder: Path,
    threads: int,
    *,
    fused: bool | None = None,
    compiled: bool = False,
    channels_last: bool = False,
) -> Step:
    torch.set_num_threads(threads)
    layout = torch.channels_last if channels_last else torch.preserve_format
    module = trainable_module(workload, folder).to(memory_format=layout)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = OPTIMIZERS[workload.optimizer](trained, fused=fused, **workload.rates)

    def update(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        logits = module(x)
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    if compiled:
        update = torch.compile(update)
    return lambda x, labels: update(
        torch.from_numpy(x).contiguous(memory_format=layout), torch.from_numpy(labels)
    ).item()


def trainable_module(workload: Workload, folder: Path) -> nn.Module:
    """Return the module of a workload with its weights, of which only trainable ones require gradients."""
    module = MODELS[workload.model]()
    if workload.adapters:
        add_adapters(module, workload.adapters)
    with np.load(folder / WEIGHTS) as weights:
        module.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(workload.trains(name))
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d) and not layer.weight.requires_grad:
            layer.eval()
    return module


def add_adapters(module: nn.Module, adapters: Adapters) -> None:
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.Linear) and fnmatch(name, adapters.targets):
            module.set_submodule(name, Adapted(layer, adapters))
