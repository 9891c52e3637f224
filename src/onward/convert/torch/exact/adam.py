"""The Adam family as Keras and optax have it, Lion and LAMB."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from onward.convert.torch.exact.optimizer import ExactOptimizer, moments


class KerasAdam(ExactOptimizer):
    """x ← x − lr·√(1−β2ᵗ) / (1−β1ᵗ) · m / (√v + ε); with `amsgrad` the largest v so far."""

    SETTINGS: ClassVar[dict[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-7,
        "amsgrad": False,
        "decoupled_weight_decay": True,
    }

    def begin(self, x: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
        return {name: torch.zeros_like(x) for name in names}

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        m, v = moments(g, state, group["betas"])
        if group["amsgrad"]:
            v = state["max_exp_avg_sq"].copy_(torch.maximum(state["max_exp_avg_sq"], v))
        rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        x.sub_(rate * (m / (v.sqrt() + group["eps"])))


class TransformersAdamW(ExactOptimizer):
    """x ← (x − lr·√(1−β2ᵗ) / (1−β1ᵗ) · m / (√v + ε))·(1 − lr·λ): weights decay after the step, not before."""

    SETTINGS: ClassVar[dict[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6}
    SLOTS = ("exp_avg", "exp_avg_sq")

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        m, v = moments(g, state, group["betas"])
        x.sub_(lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) * (m / (v.sqrt() + group["eps"])))
        x.mul_(1 - lr * group["weight_decay"])

    def decay(self, x: Tensor, g: Tensor, lr: float, group: dict[str, Any]) -> Tensor:
        return g


class OptaxAMSGrad(ExactOptimizer):
    """Adam with the largest corrected v so far: u ← max(u, v / (1−β2ᵗ));  x ← x − lr / (1−β1ᵗ) · m / (√u + ε)."""

    SETTINGS: ClassVar[dict[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    SLOTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        m, v = moments(g, state, group["betas"])
        u = state["max_exp_avg_sq"]
        u.copy_(torch.maximum(u, v / (1 - beta2**t)))
        x.sub_(lr / (1 - beta1**t) * (m / (u.sqrt() + group["eps"])))


class KerasAdamax(ExactOptimizer):
    """m ← β1·m + (1−β1)·g;  u ← max(β2·u, |g|);  x ← x − lr / (1−β1ᵗ) · m / (u + ε)."""

    SETTINGS: ClassVar[dict[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-7,
        "decoupled_weight_decay": True,
    }
    SLOTS = ("exp_avg", "exp_inf")

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        m, u = state["exp_avg"], state["exp_inf"]
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        u.copy_(torch.maximum(beta2 * u, g.abs()))
        x.sub_(lr / (1 - beta1**t) * (m / (u + group["eps"])))


class OptaxNAdam(ExactOptimizer):
    """x ← x − lr·(β1/(1−β1ᵗ⁺¹)·m + (1−β1)/(1−β1ᵗ)·g) / (√(v / (1−β2ᵗ)) + ε)."""

    SETTINGS: ClassVar[dict[str, Any]] = {"lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    SLOTS = ("exp_avg", "exp_avg_sq")

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        m, v = moments(g, state, group["betas"])
        ahead = beta1 / (1 - beta1 ** (t + 1)) * m + (1 - beta1) / (1 - beta1**t) * g
        x.sub_(lr * (ahead / ((v / (1 - beta2**t)).sqrt() + group["eps"])))


class OptaxRAdam(ExactOptimizer):
    """Momentum until the length ρ of the average behind v is above 5, then Adam, rectified.

    ρ∞ = 2/(1−β2) − 1, ρ = ρ∞ − 2t·β2ᵗ/(1−β2ᵗ), r² = (ρ−4)(ρ−2)ρ∞ / ((ρ∞−4)(ρ∞−2)ρ);
    x ← x − lr/(1−β1ᵗ) · (ρ > 5 ? r·m / (√(v / (1−β2ᵗ)) + ε) : m).
    """

    SETTINGS: ClassVar[dict[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    SLOTS = ("exp_avg", "exp_avg_sq")

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        m, v = moments(g, state, group["betas"])
        limit = 2 / (1 - beta2) - 1
        rho = limit - 2 * t * beta2**t / (1 - beta2**t)
        rate = lr / (1 - beta1**t)
        if rho > 5:
            r = math.sqrt((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho))
            x.sub_(rate * r * (m / ((v / (1 - beta2**t)).sqrt() + group["eps"])))
        else:
            x.sub_(rate * m)


class Lion(ExactOptimizer):
    """u = sign(β1·m + (1−β1)·g);  m ← β2·m + (1−β2)·g;  x ← x − lr·(u + λ·x)."""

    SETTINGS: ClassVar[dict[str, Any]] = {"lr": 1e-4, "betas": (0.9, 0.99), "decoupled_weight_decay": True}
    SLOTS = ("exp_avg",)

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        m = state["exp_avg"]
        x.sub_(lr * (beta1 * m + (1 - beta1) * g).sign())
        m.mul_(beta2).add_(g, alpha=1 - beta2)


class Lamb(ExactOptimizer):
    """u = m/(1−β1ᵗ) / (√(v / (1−β2ᵗ)) + ε) + λ·x;  x ← x − lr·‖x‖/‖u‖·u (the ratio is 1 where a norm is zero).

    With decoupled weight decay it is x that is made smaller before, and λ·x is no part of u.
    """

    SETTINGS: ClassVar[dict[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6}
    SLOTS = ("exp_avg", "exp_avg_sq")

    def decay(self, x: Tensor, g: Tensor, lr: float, group: dict[str, Any]) -> Tensor:
        return super().decay(x, g, lr, group) if group["decoupled_weight_decay"] else g

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        m, v = moments(g, state, group["betas"])
        u = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
        if not group["decoupled_weight_decay"]:
            u = u + group["weight_decay"] * x
        weight, step = float(x.norm()), float(u.norm())
        x.sub_(lr * (weight / step if weight > 0 and step > 0 else 1.0) * u)
