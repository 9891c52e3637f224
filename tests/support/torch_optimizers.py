"""Optimizers as people write them, each with habits of its own."""

from __future__ import annotations

import math
from math import sqrt

import torch
from torch.optim import Optimizer


class AdaBelief(Optimizer):
    """Counts in a Python int, and takes roots of Python numbers."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_var"] = torch.zeros_like(p)
                state["step"] += 1
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                mean, var = state["exp_avg"], state["exp_avg_var"]
                mean.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                surprise = p.grad - mean
                var.mul_(beta2).addcmul_(surprise, surprise, value=1 - beta2).add_(group["eps"])
                root = (var.sqrt() / math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
                p.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1 ** state["step"]))


class LARS(Optimizer):
    """Steps in proportion to the norm of each tensor."""

    def __init__(self, params, lr=1.0, momentum=0.9, trust=0.02):
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("momentum_buffer", torch.zeros_like(p))
                    size, slope = torch.norm(p), torch.norm(p.grad)
                    ratio = torch.where((size > 0) & (slope > 0), group["trust"] * size / slope, 1.0)
                    state["momentum_buffer"] = group["momentum"] * state["momentum_buffer"] + ratio * p.grad
                    p.sub_(state["momentum_buffer"], alpha=group["lr"])


class Normalized(Optimizer):
    """Divides by the norm over all gradients of all groups, averaged, which it keeps in an attribute."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.average = 1.0
        self.updates = 0

    @torch.no_grad()
    def step(self, closure=None):
        with_gradients = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in with_gradients]).norm().item()
        self.updates += 1
        self.average = 0.5 * self.average + 0.5 * norm
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / (self.average * sqrt(self.updates)))


class Distance(Optimizer):
    """Finds its own rate, as D-Adaptation does: numbers of the group follow from all tensors of it."""

    def __init__(self, params, lr=1.0, d0=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "d": d0, "numerator": 0.0, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            d, denominator = group["d"], 0.0
            rate = d * group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "p0" not in state:
                    state["p0"] = p.detach().clone()
                    state["s"] = torch.zeros_like(p)
                group["numerator"] += rate * torch.dot(p.grad.flatten(), (state["p0"] - p).flatten()).item()
                state["s"].mul_(group["beta"]).add_(p.grad, alpha=rate)
                denominator += state["s"].abs().sum().item()
            hat = group["numerator"] / (denominator + 1e-12)
            group["d"] = max(d, min(hat, 2 * d))
            group["k"] = group["k"] + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(self.state[p]["s"], alpha=-group["d"])


class ScheduleFree(Optimizer):
    """Averages instead of a schedule (Defazio et al. 2024), with what it needs for that in its group."""

    def __init__(self, params, lr=0.1, beta=0.9, warmup=3):
        super().__init__(params, {"lr": lr, "beta": beta, "warmup": warmup, "k": 0, "weight_sum": 0.0, "lr_max": -1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            k = group["k"]
            lr = group["lr"] * min(1.0, (k + 1) / group["warmup"])
            group["lr_max"] = max(lr, group["lr_max"])
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            share = weight / group["weight_sum"]
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if "z" not in self.state[p]:
                    self.state[p]["z"] = torch.clone(p)
            ys, grads, zs = params, [p.grad for p in params], [self.state[p]["z"] for p in params]
            torch._foreach_lerp_(ys, zs, weight=share)
            torch._foreach_add_(ys, grads, alpha=lr * (group["beta"] * (1 - share) - 1))
            torch._foreach_sub_(zs, grads, alpha=lr)
            group["k"] = k + 1


class Rectified(Optimizer):
    """Does something else in its first updates, as RAdam does; and every third one."""

    def __init__(self, params, lr=0.01, beta=0.95):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, square=torch.zeros_like(p), slow=torch.clone(p))
                state["step"] += 1
                t, beta = state["step"], group["beta"]
                state["square"].mul_(beta).addcmul_(p.grad, p.grad, value=1 - beta)
                if t > 2:
                    root = state["square"].sqrt().add_(1e-6)
                    p.addcdiv_(p.grad, root, value=-group["lr"] * math.sqrt((1 - beta**t) / t))
                else:
                    p.add_(p.grad, alpha=-group["lr"])
                if t % 3 == 0:
                    state["slow"].add_(p - state["slow"], alpha=0.5)
                    p.copy_(state["slow"])


class Flagged(Optimizer):
    """Notes in its group whether it has warmed up, and in words what it does."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "warm": False, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            rate = group["lr"] if group["warm"] else 0.1 * group["lr"]
            for p in group["params"]:
                p.add_(p.grad, alpha=-rate)
            group["k"] += 1
            if group["k"] >= 5:
                group["warm"] = True


class First(Optimizer):
    """Begins with the first gradient."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "buffer" not in state:
                    state["buffer"] = torch.clone(p.grad)
                else:
                    state["buffer"].mul_(0.9).add_(p.grad)
                p.add_(state["buffer"], alpha=-group["lr"])


class SAM(Optimizer):
    """Looks at the loss twice (Foret et al. 2021)."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        assert closure is not None, "SAM needs a closure"


class Hard(Optimizer):
    """Decides for each tensor by what is in it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad.norm() > 1 and p.norm() > 1 and p.grad.mean() > p.mean():
                    p.add_(p.grad, alpha=-group["lr"])


class Noisy(Optimizer):
    """Langevin dynamics: draws random numbers."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"]).add_(torch.randn_like(p), alpha=0.1)


CALLS = []


class Outside(Optimizer):
    """Keeps something where nobody looks."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        CALLS.append(1)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / len(CALLS))


class Alternating(Optimizer):
    """Does not treat alike what is alike."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * (1 + i % 3))
