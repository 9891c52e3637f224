"""PyTorch objects for what PyTorch has no class for.

This file imports only PyTorch, so that programs that run without Onward can contain its source.
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
    """Clip gradients to a norm: g · limit / norm. PyTorch's own function adds 1e-6 to the norm."""
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    if norm > limit:
        for parameter in parameters:
            parameter.grad.mul_(limit / norm)


class ExactOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Optimizer that is one formula per parameter."""

    SETTINGS: ClassVar[dict[str, Any]] = {}
    """Settings in addition to `COMMON`, with defaults."""
    COMMON: ClassVar[dict[str, Any]] = {"weight_decay": 0.0, "decoupled_weight_decay": False, "maximize": False}

    def __init__(self, params: ParamsT, **settings: Any) -> None:
        defaults = {**self.COMMON, **self.SETTINGS}
        unknown = [name for name in settings if name not in defaults]
        if unknown:
            raise TypeError(f"{type(self).__name__} has no setting {', '.join(unknown)}")
        super().__init__(params, {**defaults, **settings})

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
        """Return the names of the state tensors of a parameter."""
        raise NotImplementedError

    def begin(self, x: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update."""
        return {name: torch.full_like(x, group.get("initial_accumulator_value", 0.0)) for name in self.slots(group)}

    def decay(self, x: Tensor, g: Tensor, lr: float, group: dict[str, Any]) -> Tensor:
        """Apply decoupled weight decay, or return the gradient with weight decay added."""
        if not group["weight_decay"]:
            return g
        if group["decoupled_weight_decay"]:
            x.mul_(1 - lr * group["weight_decay"])
            return g
        return g + group["weight_decay"] * x

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        """Update parameter and state in place; `t` counts updates from 1."""
        raise NotImplementedError


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of an optional closure."""
    with torch.enable_grad():
        return None if closure is None else closure()


class Together(torch.optim.Optimizer):  # type: ignore[misc]
    """Several optimizers that step as one and share their groups and state."""

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
    """Return float32 copies of 16-bit parameters, and other parameters themselves."""
    narrow = (torch.float16, torch.bfloat16)
    return {name: Parameter(x.detach().float()) if x.dtype in narrow else x for name, x in parameters.items()}


class MasterWeights(torch.optim.Optimizer):  # type: ignore[misc]
    """Optimizer of float32 copies, with the parameters in its groups. A step rounds the copies to them.

        parameters = dict(module.named_parameters())
        copies = float32_copies(parameters)
        optimizer = MasterWeights(torch.optim.AdamW(copies.values(), lr=1e-3), parameters, copies)

    The state of a parameter is that of its copy, with the copy itself as `master`.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, parameters: Mapping[str, Parameter], copies: Mapping[str, Parameter]
    ) -> None:
        self.inner = inner
        """Optimizer of the copies. A hook of it may clip their gradients."""
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
        """Copy the current settings, which a scheduler changes, to the inner optimizer."""
        _settle(self.param_groups, self.inner.param_groups)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        stored_groups = state_dict["param_groups"]
        _settle(stored_groups, self.param_groups)
        _settle(stored_groups, self.inner.param_groups)
        numbers = [number for group in stored_groups for number in group["params"]]
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
        """Update the state from that of the inner optimizer."""
        for x, copy in self.copies.items():
            master = {} if x is copy else {"master": copy.detach()}
            self.state[x] = {**self.inner.state.get(copy, {}), **master}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "inner": self.inner, "copies": self.copies}


def _settle(sources: list[dict[str, Any]], targets: list[dict[str, Any]]) -> None:
    """Copy settings from groups to others."""
    for source, target in zip(sources, targets, strict=True):
        target.update({key: value for key, value in source.items() if key != "params"})


def adafactor_direction(
    g: Tensor, square: Tensor, state: dict[str, Any], weight: float, axes: tuple[int, int] | None
) -> Tensor:
    """Update the mean squares of Adafactor, and return the gradient divided by their root."""
    if axes is None:
        return g / state["variance"].mul_(1 - weight).add_(square, alpha=weight).sqrt()
    small, large = axes
    r = state["row_var"].mul_(1 - weight).add_(square.mean(large, keepdim=True), alpha=weight)
    c = state["col_var"].mul_(1 - weight).add_(square.mean(small, keepdim=True), alpha=weight)
    return g / (r / r.mean(small, keepdim=True)).sqrt() / c.sqrt()


class OptaxAdafactor(ExactOptimizer):
    """Adafactor with the mean squares of the two largest axes. With β = 1 − t^decay and s = g² + ε1:

    r ← β·r + (1−β)·mean(s, large);  c ← β·c + (1−β)·mean(s, small);
    u = g / √(r / mean(r, small)) / √c;
    x ← x·(1 − λ) − lr·max(ε2, rms(x)) · u / max(1, rms(u)/d).

    Small parameters have one v in place of r and c.
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
        """Return the second largest axis and the largest, or None if one of them is small."""
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
        weight = t ** group["beta2_decay"]
        square = g * g + eps1
        u = adafactor_direction(g, square, state, weight, self.factored_axes(x.shape, group["min_dim_size_to_factor"]))
        step_size = lr * max(eps2, rms(x)) / max(1.0, rms(u) / group["d"])
        x.mul_(1 - group["weight_decay"]).sub_(step_size * u)


class TransformersAdafactor(ExactOptimizer):
    """Adafactor of transformers with a given learning rate. With β = 1 − t^decay and s = g² + ε1:

    r ← β·r + (1−β)·mean(s, last axis);  c ← β·c + (1−β)·mean(s, axis before it);
    u = g / √(r / mean(r)) / √c;
    x ← x·(1 − α·λ) − α·u / max(1, rms(u)/d),  α = lr·max(ε2, rms(x)), or lr without `scale_parameter`.

    Vectors have one v in place of r and c.
    """

    SETTINGS: ClassVar[dict[str, Any]] = {
        "lr": 1e-3,
        "beta2_decay": -0.8,
        "eps": (1e-30, 1e-3),
        "d": 1.0,
        "scale_parameter": True,
    }

    def begin(self, x: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        zeros = torch.zeros_like(x)
        if x.dim() < 2:
            return {"variance": zeros}
        return {"row_var": zeros.mean(-1, keepdim=True), "col_var": zeros.mean(-2, keepdim=True)}

    def decay(self, x: Tensor, g: Tensor, lr: float, group: dict[str, Any]) -> Tensor:
        return g

    def update(self, x: Tensor, g: Tensor, state: dict[str, Any], lr: float, t: int, group: dict[str, Any]) -> None:
        eps1, eps2 = group["eps"]
        weight = t ** group["beta2_decay"]
        square = g * g + eps1
        u = adafactor_direction(g, square, state, weight, None if x.dim() < 2 else (-2, -1))
        step_size = lr * max(eps2, rms(x)) if group["scale_parameter"] else lr
        x.mul_(1 - group["weight_decay"] * step_size).sub_(step_size / max(1.0, rms(u) / group["d"]) * u)


def rms(x: Tensor) -> float:
    return math.sqrt(float((x * x).mean()))


class Muon(ExactOptimizer):
    """b ← μ·b + (1−μ)·g;  x ← x·(1 − lr·λ) − lr·factor·orthogonal(u).

    u = b, or μ·b + (1−μ)·g with `nesterov`. Like torch.optim.Muon, but the Newton-Schulz steps have
    the type of the parameter, where PyTorch has bfloat16.
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
    """Return a nearly orthogonal matrix by Newton-Schulz steps from x / ‖x‖.

    Each of `steps` is X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ.
    """
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    y = (x.T if tall else x) / max(float(x.norm()), eps)
    for _ in range(steps):
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.T if tall else y


def population_batch_norm(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, training: bool, momentum: float, eps: float
) -> Tensor:
    """Normalize a batch, with running population variance. PyTorch's own divides by n - 1."""
    if not training:
        return F.batch_norm(x, mean, variance, weight, bias, False, momentum, eps)
    with torch.no_grad():
        new_variance, new_mean = torch.var_mean(x, (0, *range(2, x.ndim)), correction=0)
        variance.mul_(1 - momentum).add_(new_variance, alpha=momentum)
        mean.mul_(1 - momentum).add_(new_mean, alpha=momentum)
    return F.batch_norm(x, None, None, weight, bias, True, momentum, eps)


class PopulationBatchNorm(_BatchNorm):  # type: ignore[misc]
    """Batch normalization of tensors of any rank by `population_batch_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        return population_batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum, self.eps)


class Reduced(nn.Module):  # type: ignore[misc]
    """Loss of single elements, with a reduction."""

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
    """Binary cross entropy of probabilities that are clipped away from 0 and 1."""

    def __init__(self, clip: float, weight: Tensor | None = None, reduction: str = "mean") -> None:
        super().__init__(weight=weight, reduction=reduction)
        self.clip = clip

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input.clamp(self.clip, 1 - self.clip), target)


class ClassesLast(nn.Module):  # type: ignore[misc]
    """Classification loss for scores with classes on the last axis, not the second."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        moved = target.movedim(-1, 1) if target.is_floating_point() else target
        return self.loss(scores.movedim(-1, 1), moved)


class CTC(nn.CTCLoss):  # type: ignore[misc]
    """CTC loss of log-probabilities, of logits, or of scores [N, T, C].

    `lengths` says which lengths follow the targets: "both", "input", "target" or "neither".
    """

    def __init__(
        self,
        blank: int,
        zero_infinity: bool,
        reduction: str,
        logits: bool = False,
        batch_first: bool = False,
        lengths: str = "both",
    ) -> None:
        super().__init__(blank, reduction, zero_infinity)
        self.logits = logits
        self.batch_first = batch_first
        self.lengths = lengths

    def forward(self, log_probs: Tensor, targets: Tensor, *lengths: Tensor) -> Tensor:
        scores = log_probs.log_softmax(-1) if self.logits else log_probs
        scores = scores.transpose(0, 1) if self.batch_first else scores
        given = list(lengths)
        widths = torch.full(scores.shape[1:2], len(scores), device=scores.device)
        input_lengths = given.pop(0) if self.lengths in ("both", "input") else widths
        ends = torch.arange(1, targets.shape[1] + 1, device=targets.device)
        is_label = (targets >= 0) & (targets != self.blank)
        target_lengths = given.pop(0) if given else (is_label * ends).amax(1)
        return super().forward(scores, targets, input_lengths, target_lengths)


class Scaled(nn.Module):  # type: ignore[misc]
    """Loss times a number."""

    def __init__(self, loss: nn.Module, scale: float) -> None:
        super().__init__()
        self.loss = loss
        self.scale = scale

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.loss(*inputs) * self.scale


class SumOfLosses(nn.Module):  # type: ignore[misc]
    """Sum of losses of a module's outputs: `loss(module(x), *targets)`.

    `outputs` names the prediction of each loss, `targets` is the number of its targets. Arguments
    may also be one tuple per loss, of a prediction and its targets.
    """

    def __init__(self, losses: list[nn.Module], outputs: list[str | None], targets: list[int]) -> None:
        super().__init__()
        self.losses = nn.ModuleList(losses)
        self.outputs = outputs
        self.targets = targets

    def forward(self, *inputs: Tensor | Mapping[str, Tensor] | tuple[Tensor, ...]) -> Tensor:
        arguments = inputs if isinstance(inputs[0], tuple) else self.by_loss(*inputs)
        losses = [loss(*terms) for loss, terms in zip(self.losses, arguments, strict=True)]
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
    """Loss of an inner value that the module returns under this name."""

    def __init__(self, output: str, loss: nn.Module) -> None:
        super().__init__()
        self.output = output
        self.loss = loss

    def forward(self, outputs: Tensor | Mapping[str, Tensor], *targets: Tensor) -> Tensor:
        return self.loss(outputs[self.output] if isinstance(outputs, Mapping) else outputs, *targets)


class OwnLoss(nn.Module):  # type: ignore[misc]
    """Loss that a module computes itself: its output of this name, or the only one."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.output = output

    def forward(self, outputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        return outputs[self.output] if isinstance(outputs, Mapping) else outputs
