"""PyTorch objects that compute what no class of PyTorch's own does.

This file imports nothing but PyTorch, so that its source can go into a program that runs without Onward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import ParamsT


def scale_to_norm(parameters: list[nn.Parameter], limit: float) -> None:
    """Make gradients smaller if their norm is above a limit: g · limit / norm. PyTorch's own adds 1e-6 to the norm."""
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    if norm > limit:
        for parameter in parameters:
            parameter.grad.mul_(limit / norm)


class ExactOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer that is one formula for each parameter."""

    SETTINGS: ClassVar[dict[str, Any]] = {}
    """What it can be told beside `COMMON`, with defaults."""
    COMMON: ClassVar[dict[str, Any]] = {"weight_decay": 0.0, "decoupled_weight_decay": False, "maximize": False}

    def __init__(self, params: ParamsT, **settings: Any) -> None:
        known = {**self.COMMON, **self.SETTINGS}
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise TypeError(f"{type(self).__name__} has no setting {', '.join(unknown)}")
        super().__init__(params, {**known, **settings})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    self._step_of(x, -x.grad if group["maximize"] else x.grad, group)
        return loss

    def _step_of(self, x: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state[x]
        if not state:
            state["step"] = torch.tensor(0.0)
            state.update(self.begin(x, group))
        state["step"] += 1
        lr = float(group["lr"])
        g = self.decay(x, g, lr, group)
        self.update(x, g, state, lr, int(state["step"]), group)

    def slots(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Tensors that it keeps beside a parameter."""
        raise NotImplementedError

    def begin(self, x: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter before its first update."""
        return {name: torch.full_like(x, group.get("initial_accumulator_value", 0.0)) for name in self.slots(group)}

    def decay(self, x: Tensor, g: Tensor, lr: float, group: dict[str, Any]) -> Tensor:
        """Decoupled weight decay makes the parameter smaller; any other is part of the gradient, which is returned."""
        if not group["weight_decay"]:
            return g
        if group["decoupled_weight_decay"]:
            x.mul_(1 - lr * group["weight_decay"])
            return g
        return g + group["weight_decay"] * x

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        """Write the new parameter and state over the old ones; `t` counts this update from 1."""
        raise NotImplementedError


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """The loss that a closure computes, if there is one."""
    with torch.enable_grad():
        return None if closure is None else closure()


class Together(torch.optim.Optimizer):  # type: ignore[misc]
    """Several optimizers that step as one: their groups and their state are its own."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        for optimizer in optimizers:
            self.state.update(optimizer.state)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            optimizer.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss


def float32_copies(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Copies of parameters in 16 bits, for an optimizer to work on; others are themselves."""
    narrow = (torch.float16, torch.bfloat16)
    return {name: Parameter(x.detach().float()) if x.dtype in narrow else x for name, x in parameters.items()}


class MasterWeights(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer of copies, with the parameters themselves in its groups: a step rounds the copies to them.

    parameters = dict(module.named_parameters())
    copies = float32_copies(parameters)
    optimizer = MasterWeights(torch.optim.AdamW(copies.values(), lr=1e-3), parameters, copies)

    The state of a parameter is that of its copy, and the copy itself: `master`.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, parameters: Mapping[str, Parameter], copies: Mapping[str, Parameter]
    ) -> None:
        self.inner = inner
        """The optimizer of the copies. What it is to do with their gradients before a step is a hook of its own."""
        self.copies = {parameters[name]: copy for name, copy in copies.items()}
        originals = {copy: parameter for parameter, copy in self.copies.items()}
        groups = [{**group, "params": [originals[x] for x in group["params"]]} for group in inner.param_groups]
        super().__init__(groups, inner.defaults)
        self._show()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        self.settle()
        changed = [(x, copy) for x, copy in self.copies.items() if x is not copy and x.grad is not None]
        for x, copy in changed:
            copy.grad = x.grad.to(copy.dtype)
        self.inner.step()
        for x, copy in changed:
            x.copy_(copy)
            copy.grad = None
        _settle(self.inner.param_groups, self.param_groups)
        self._show()
        return loss

    def settle(self) -> None:
        """Give the inner optimizer the settings that the groups have now: a scheduler changes these."""
        _settle(self.param_groups, self.inner.param_groups)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        given = state_dict["param_groups"]
        _settle(given, self.param_groups)
        _settle(given, self.inner.param_groups)
        numbers = [number for group in given for number in group["params"]]
        own = [x for group in self.param_groups for x in group["params"]]
        for number, x in zip(numbers, own, strict=True):
            if number in state_dict["state"]:
                state, copy = dict(state_dict["state"][number]), self.copies[x]
                if "master" in state:
                    copy.copy_(state.pop("master"))
                    x.copy_(copy)
                for slot, value in state.items():
                    if isinstance(value, Tensor):
                        state[slot] = value.clone() if slot == "step" else value.to(copy, copy=True)
                self.inner.state[copy] = state
        self._show()

    def _show(self) -> None:
        """Let the state be what the inner optimizer has now."""
        for x, copy in self.copies.items():
            master = {} if x is copy else {"master": copy.detach()}
            self.state[x] = {**self.inner.state.get(copy, {}), **master}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "inner": self.inner, "copies": self.copies}


def _settle(given: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Give groups the settings of others."""
    for one, other in zip(given, groups, strict=True):
        other.update({key: value for key, value in one.items() if key != "params"})


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


def population_batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    bias: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """Batch normalization that keeps the variance of batches as it is; PyTorch's own divides by n - 1 for it."""
    if not training:
        return F.batch_norm(x, mean, variance, weight, bias, False, momentum, eps)
    with torch.no_grad():
        new_variance, new_mean = torch.var_mean(x, (0, *range(2, x.ndim)), correction=0)
        variance.mul_(1 - momentum).add_(new_variance, alpha=momentum)
        mean.mul_(1 - momentum).add_(new_mean, alpha=momentum)
    return F.batch_norm(x, None, None, weight, bias, True, momentum, eps)


class PopulationBatchNorm(_BatchNorm):  # type: ignore[misc]
    """Batch normalization, of tensors with any number of axes, by `population_batch_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        return population_batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum, self.eps)


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
