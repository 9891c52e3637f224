"""Losses that PyTorch has no class for, and those of several parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Reduced(nn.Module):  # type: ignore[misc]
    """A loss of single elements, and how they become one number."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        loss = self.elements(prediction, target)
        return loss.sum() if self.reduction == "sum" else loss.mean()

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError


class Hinge(Reduced):
    """max(1 − y·x, 0), for targets y of −1 and 1."""

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        return torch.relu(1 - target * prediction)


class SquaredHinge(Reduced):
    """max(1 − y·x, 0)², for targets y of −1 and 1."""

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        return torch.relu(1 - target * prediction) ** 2


class CosineDistance(Reduced):
    """1 − x·y / √((‖x‖² + ε)·(‖y‖² + ε)), along an axis."""

    def __init__(self, axis: int = -1, eps: float = 1e-12, reduction: str = "mean") -> None:
        super().__init__(reduction)
        self.axis = axis
        self.eps = eps

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        squares = [(x * x).sum(self.axis) + self.eps for x in (prediction, target)]
        return 1 - (prediction * target).sum(self.axis) / (squares[0] * squares[1]).sqrt()


class ClippedBCELoss(nn.BCELoss):  # type: ignore[misc]
    """Binary cross entropy of probabilities that are kept away from 0 and 1."""

    def __init__(self, clip: float, weight: Tensor | None = None, reduction: str = "mean") -> None:
        super().__init__(weight=weight, reduction=reduction)
        self.clip = clip

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input.clamp(self.clip, 1 - self.clip), target)


class ClassesLast(nn.Module):  # type: ignore[misc]
    """A loss of classifiers for scores whose classes are on the last axis; PyTorch has them on the second."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        moved = target.movedim(-1, 1) if target.is_floating_point() else target
        return self.loss(scores.movedim(-1, 1), moved)


class CTC(nn.CTCLoss):  # type: ignore[misc]
    """Connectionist temporal classification of logits, or of scores [N, T, C]."""

    def __init__(
        self, blank: int, zero_infinity: bool, reduction: str, logits: bool = False, batch_first: bool = False
    ) -> None:
        super().__init__(blank, reduction, zero_infinity)
        self.logits = logits
        self.batch_first = batch_first

    def forward(self, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        scores = log_probs.log_softmax(-1) if self.logits else log_probs
        scores = scores.transpose(0, 1) if self.batch_first else scores
        return super().forward(scores, targets, input_lengths, target_lengths)


class Scaled(nn.Module):  # type: ignore[misc]
    """A loss times a number."""

    def __init__(self, loss: nn.Module, scale: float) -> None:
        super().__init__()
        self.loss = loss
        self.scale = scale

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.loss(*inputs) * self.scale


class SumOfLosses(nn.Module):  # type: ignore[misc]
    """The sum of several losses of what a module returns: `loss(module(x), *targets)`.

    `outputs` names the prediction of each loss, `targets` says how many targets it takes. Arguments may also be one
    tuple for each loss: of a prediction and its targets.
    """

    def __init__(self, losses: list[nn.Module], outputs: list[str | None], targets: list[int]) -> None:
        super().__init__()
        self.losses = nn.ModuleList(losses)
        self.outputs = outputs
        self.targets = targets

    def forward(self, *inputs: Tensor | Mapping[str, Tensor] | tuple[Tensor, ...]) -> Tensor:
        given = inputs if isinstance(inputs[0], tuple) else self.by_loss(*inputs)
        losses = [loss(*own) for loss, own in zip(self.losses, given, strict=True)]
        return torch.stack(losses).sum()

    def by_loss(self, outputs: Tensor | Mapping[str, Tensor], *targets: Tensor) -> list[tuple[Tensor, ...]]:
        if len(targets) != sum(self.targets):
            raise TypeError(f"the losses take {sum(self.targets)} targets, not {len(targets)}")
        remaining = iter(targets)
        named: dict[Any, Tensor] = {**outputs} if isinstance(outputs, Mapping) else {}
        first = next(iter(named.values()), outputs)
        return [
            (named.get(name, first), *(next(remaining) for _ in range(count)))
            for name, count in zip(self.outputs, self.targets, strict=True)
        ]


class Watching(nn.Module):  # type: ignore[misc]
    """A loss of a value that the module returns under this name, beside what it is for."""

    def __init__(self, output: str, loss: nn.Module) -> None:
        super().__init__()
        self.output = output
        self.loss = loss

    def forward(self, outputs: Tensor | Mapping[str, Tensor], *targets: Tensor) -> Tensor:
        return self.loss(outputs[self.output] if isinstance(outputs, Mapping) else outputs, *targets)


class OwnLoss(nn.Module):  # type: ignore[misc]
    """The loss that a module computes itself: its output of this name, or the only one."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.output = output

    def forward(self, outputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        return outputs[self.output] if isinstance(outputs, Mapping) else outputs
