"""Optimizers that divide by averages of squared gradients, as Keras and optax have them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from onward.convert.torch.exact.optimizer import ExactOptimizer


class RootEpsAdagrad(ExactOptimizer):
    """h ← h + g²;  x ← x − lr·g / √(h + ε)."""

    SETTINGS: ClassVar[dict[str, Any]] = {"lr": 1e-2, "initial_accumulator_value": 0.1, "eps": 1e-7}

    def begin(self, x: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"sum": torch.full_like(x, group["initial_accumulator_value"])}

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        h = state["sum"].addcmul_(g, g)
        x.sub_(lr * (g / (h + group["eps"]).sqrt()))


class RootEpsRMSprop(ExactOptimizer):
    """v ← α·v + (1−α)·g²;  b ← μ·b + lr·g / √(v + ε);  x ← x − b; centered: v − a² for v, with a the mean of g."""

    SETTINGS: ClassVar[dict[str, Any]] = {"lr": 1e-2, "alpha": 0.9, "eps": 1e-7, "momentum": 0.0, "centered": False}

    def begin(self, x: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        wanted = {"square_avg": True, "grad_avg": group["centered"], "momentum_buffer": group["momentum"] > 0}
        return {name: torch.zeros_like(x) for name, there in wanted.items() if there}

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        alpha = group["alpha"]
        v = state["square_avg"].mul_(alpha).addcmul_(g, g, value=1 - alpha)
        if group["centered"]:
            a = state["grad_avg"].mul_(alpha).add_(g, alpha=1 - alpha)
            v = v - a * a
        step = lr * (g / (v + group["eps"]).sqrt())
        if group["momentum"] > 0:
            step = state["momentum_buffer"].mul_(group["momentum"]).add_(step)
        x.sub_(step)


class AdadeltaW(ExactOptimizer):
    """v ← ρ·v + (1−ρ)·g²;  d = g·√(u + ε) / √(v + ε);  u ← ρ·u + (1−ρ)·d²;  x ← x·(1 − lr·λ) − lr·d."""

    SETTINGS: ClassVar[dict[str, Any]] = {"lr": 1e-3, "rho": 0.95, "eps": 1e-7, "decoupled_weight_decay": True}
    SLOTS = ("square_avg", "acc_delta")

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        rho, eps = group["rho"], group["eps"]
        v = state["square_avg"].mul_(rho).addcmul_(g, g, value=1 - rho)
        u = state["acc_delta"]
        d = g * (u + eps).sqrt() / (v + eps).sqrt()
        u.mul_(rho).addcmul_(d, d, value=1 - rho)
        x.sub_(lr * d)
