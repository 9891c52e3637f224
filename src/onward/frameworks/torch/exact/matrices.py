"""Optimizers that look at a parameter as rows and columns."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from onward.frameworks.torch.exact.optimizer import ExactOptimizer


class OptaxAdafactor(ExactOptimizer):
    """Adafactor with the mean squares of the two largest axes. With β = 1 − t^decay and s = g² + ε1:

    r ← β·r + (1−β)·mean(s, large);  c ← β·c + (1−β)·mean(s, small);  u = g / √(r / mean(r, small)) / √c;
    x ← x·(1 − λ) − lr·max(ε2, rms(x)) · u / max(1, rms(u)/d). Small parameters keep one v in place of r and c.
    """

    SETTINGS: ClassVar[dict[str, Any]] = {
        "lr": 1e-2,
        "beta2_decay": -0.8,
        "eps": (1e-30, 1e-3),
        "d": 1.0,
        "min_dim_size_to_factor": 128,
    }

    @staticmethod
    def factored_axes(shape: torch.Size, smallest: int) -> tuple[int, int] | None:
        """The second largest axis and the largest, unless one of them is small."""
        if len(shape) < 2 or sorted(shape)[-2] < smallest:
            return None
        small, large = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))[-2:]
        return small, large

    def begin(self, x: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        axes = self.factored_axes(x.shape, group["min_dim_size_to_factor"])
        if axes is None:
            return {"variance": torch.zeros_like(x)}
        zeros = torch.zeros_like(x)
        return {name: zeros.mean(axis, keepdim=True) for name, axis in zip(("col_var", "row_var"), axes, strict=True)}

    def decay(self, x: Tensor, g: Tensor, lr: float, group: dict[str, Any]) -> Tensor:
        return g

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        eps1, eps2 = group["eps"]
        share = t ** group["beta2_decay"]
        square = g * g + eps1
        axes = self.factored_axes(x.shape, group["min_dim_size_to_factor"])
        if axes is None:
            u = g / state["variance"].mul_(1 - share).add_(square, alpha=share).sqrt()
        else:
            small, large = axes
            r = state["row_var"].mul_(1 - share).add_(square.mean(large, keepdim=True), alpha=share)
            c = state["col_var"].mul_(1 - share).add_(square.mean(small, keepdim=True), alpha=share)
            u = g / (r / r.mean(small, keepdim=True)).sqrt() / c.sqrt()
        rate = lr * max(eps2, rms(x)) / max(1.0, rms(u) / group["d"])
        x.mul_(1 - group["weight_decay"]).sub_(rate * u)


def rms(x: Tensor) -> float:
    return math.sqrt(float((x * x).mean()))


class Muon(ExactOptimizer):
    """b ← μ·b + (1−μ)·g;  x ← x·(1 − lr·λ) − lr·factor·u with u = b (nesterov: μ·b + (1−μ)·g) made orthogonal.

    As torch.optim.Muon, but for the type of the Newton-Schulz steps: that of the parameter, where PyTorch has bfloat16.
    """

    SETTINGS: ClassVar[dict[str, Any]] = {
        "lr": 1e-3,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.775, 2.0315),
        "ns_steps": 5,
        "eps": 1e-7,
        "adjust_lr_fn": "original",
        "weight_decay": 0.1,
        "decoupled_weight_decay": True,
    }

    def slots(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        momentum, (rows, columns) = group["momentum"], x.shape
        b = state["momentum_buffer"].mul_(momentum).add_(g, alpha=1 - momentum)
        u = momentum * b + (1 - momentum) * g if group["nesterov"] else b
        if group["adjust_lr_fn"] == "original":
            factor = math.sqrt(max(1.0, rows / columns))
        else:
            factor = 0.2 * math.sqrt(max(rows, columns))
        x.sub_(lr * factor * orthogonal(u, group["ns_coefficients"], group["ns_steps"], group["eps"]))


def orthogonal(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """A nearly orthogonal matrix in place of x: `steps` times X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ, from x / ‖x‖."""
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    y = (x.T if tall else x) / max(float(x.norm()), eps)
    for _ in range(steps):
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.T if tall else y
