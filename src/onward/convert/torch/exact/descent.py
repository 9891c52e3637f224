"""Gradient descent as Keras has it, and with decoupled weight decay."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from onward.convert.torch.exact.optimizer import ExactOptimizer


class _Descent(ExactOptimizer):
    """Along the gradient, or along a buffer of gradients if there is a momentum."""

    def begin(self, x: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(x)} if group["momentum"] else {}

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        if group["momentum"]:
            self.follow(x, g, state["momentum_buffer"], lr, t, group)
        else:
            x.sub_(lr * g)

    def follow(self, x: Tensor, g: Tensor, buffer: Tensor, lr: float, t: int, group: dict[str, Any]) -> None:
        raise NotImplementedError


class KerasSGD(_Descent):
    """m ← μ·m − lr·g;  x ← x + m: the learning rate of each step stays in the buffer."""

    SETTINGS: ClassVar[dict[str, Any]] = {
        "lr": 1e-2,
        "momentum": 0.0,
        "nesterov": False,
        "decoupled_weight_decay": True,
    }

    def follow(self, x: Tensor, g: Tensor, buffer: Tensor, lr: float, t: int, group: dict[str, Any]) -> None:
        m = buffer.mul_(group["momentum"]).sub_(lr * g)
        x.add_(group["momentum"] * m - lr * g if group["nesterov"] else m)


class SGDW(_Descent):
    """v ← μ·v + (1−τ)·g, but v ← g in the first update;  x ← x·(1 − lr·λ) − lr·v."""

    SETTINGS: ClassVar[dict[str, Any]] = {
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "nesterov": False,
        "weight_decay": 1e-2,
        "decoupled_weight_decay": True,
    }

    def follow(self, x: Tensor, g: Tensor, buffer: Tensor, lr: float, t: int, group: dict[str, Any]) -> None:
        share = 1 - group["dampening"] if t > 1 else 1.0
        v = buffer.mul_(group["momentum"]).add_(g, alpha=share)
        x.sub_(lr * (g + group["momentum"] * v if group["nesterov"] else v))
