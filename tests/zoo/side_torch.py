"""Runs of PyTorch: a module, its loss, an optimizer and a batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import onward
from onward.frameworks.torch.arguments import Flat, tensors_of
from onward.frameworks.torch.module_capture import copy_module
from onward.frameworks.torch.probe import FixedDraws, NothingDropped
from zoo import NUDGES, STEPS, Run, nudged, targets_of, without_draws


@dataclasses.dataclass
class Objects:
    """What a training loop of PyTorch has."""

    module: nn.Module
    inputs: Any
    """A tensor, a sequence or a mapping, as `from_torch` takes it."""
    loss: Any = "loss"
    """A loss of the result of the module and the targets, or the name of the output that is the loss."""
    targets: Any = None
    optimizer: Callable[[Sequence[Any]], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(
        parameters, lr=1e-2, eps=1e-3
    )
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of `from_torch`."""


def without_dropout(module: nn.Module) -> nn.Module:
    """Return the module in training mode with all probabilities of dropping set to 0."""
    for layer in module.modules():
        for key, value in list(vars(layer).items()):
            if isinstance(value, float) and ("drop" in key or (key == "p" and "Drop" in type(layer).__name__)):
                setattr(layer, key, 0.0)
        config = getattr(layer, "config", None)
        for key, value in list(vars(config).items() if config is not None else ()):
            if isinstance(value, float) and ("drop" in key or key == "mask_time_prob"):
                setattr(config, key, 0.0)
    return module.train()


def run(objects: Objects) -> Run:
    torch.manual_seed(0)
    module = objects.module
    optimizer = objects.optimizer([x for x in module.parameters() if x.requires_grad])
    training = onward.from_torch(
        module, objects.inputs, loss=objects.loss, example_targets=objects.targets, optimizer=optimizer,
        **objects.options,
    )  # fmt: skip
    inputs = {name: tensor.numpy() for name, tensor in Flat(copy_module(module), objects.inputs).inputs.items()}
    targets = dict(zip(targets_of(training), (x.numpy() for x in _tensors(objects.targets)), strict=True))
    losses, weights, gradients = _steps(objects, 0)

    def moved(seeds: Iterable[int]) -> list[tuple[list[float], dict[str, np.ndarray]]]:
        return [_steps(objects, seed)[:2] for seed in seeds]

    further = functools.partial(moved, range(1 + NUDGES, 1 + 3 * NUDGES))
    batch = {**inputs, **targets}
    return Run(without_draws(training), batch, losses, weights, moved(range(1, 1 + NUDGES)), further, gradients)


def _tensors(targets: Any) -> list[torch.Tensor]:
    if targets is None:
        return []
    if isinstance(targets, Mapping):
        return [x for each in targets.values() for x in _tensors(each)]
    return [targets] if isinstance(targets, torch.Tensor) else [x for each in targets for x in _tensors(each)]


def _steps(objects: Objects, seed: int) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return losses, weights and first gradients of a copy; with a seed, from weights with other last digits."""
    module = copy_module(objects.module)
    if seed:
        arrays = nudged({name: x.detach().numpy() for name, x in module.named_parameters()}, seed)
        with torch.no_grad():
            for name, x in module.named_parameters():
                x.copy_(torch.from_numpy(arrays[name]))
    optimizer = objects.optimizer([x for x in module.parameters() if x.requires_grad])
    losses: list[float] = []
    gradients: dict[str, np.ndarray] = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        with NothingDropped(), FixedDraws():
            loss = _loss(objects, _call(module, objects.inputs))
        loss.backward()
        if not losses:
            gradients = {n: x.grad.numpy().copy() for n, x in module.named_parameters() if x.grad is not None}
        optimizer.step()
        losses.append(float(loss.detach()))
    named = dict(module.named_parameters())
    main = {id(x): name for name, x in reversed([*named.items(), *tensors_of(module)])}
    return losses, {main[id(x)]: x.detach().numpy().copy() for x in named.values() if x.requires_grad}, gradients


def _call(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(inputs) if isinstance(inputs, torch.Tensor) else module(*inputs)


def _loss(objects: Objects, result: Any) -> torch.Tensor:
    if objects.loss == "loss":
        return result["loss"] if isinstance(result, Mapping) else result.loss
    if objects.loss == "output":
        return result
    if isinstance(objects.loss, Mapping):
        total = torch.zeros(())
        for name, term in objects.loss.items():
            scale, function = term if isinstance(term, tuple) else (1.0, term)
            total = total + scale * function(_named(result, name), *_tensors((objects.targets or {}).get(name)))
        return total
    return objects.loss(result, *_tensors(objects.targets))


def _named(result: Any, name: str) -> torch.Tensor:
    if isinstance(result, Mapping):
        return result[name]
    return result[int(name.removeprefix("output_"))] if isinstance(result, tuple) else getattr(result, name)
