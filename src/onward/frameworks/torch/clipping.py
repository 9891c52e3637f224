"""Clipping of gradients as a part of an optimizer's step, where PyTorch leaves it to the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from onward.errors import UnsupportedError
from onward.frameworks.torch.exact.clipping import scale_to_norm
from onward.frameworks.torch.exact.masters import MasterWeights

_Settings = Mapping[str, Any]


class Clip:
    """Clips the gradients of an optimizer before it steps: for `register_step_pre_hook`.

    It refuses to, if it is told how many numbers the optimizer has, and there are others: those who divide parameters
    among processes behind PyTorch's back, as DeepSpeed does, leave a part of each, whose norm is not that of all.
    """

    def __init__(self, settings: _Settings, size: int | None = None):
        self.settings, self.size = settings, size

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = parameters_of(optimizer)
        if self.size is not None and sum(parameter.numel() for parameter in parameters) != self.size:
            raise UnsupportedError(
                "the optimizer has parts of parameters, of whose gradients it cannot tell the norm, and it clips",
                hint="let DeepSpeed clip: `gradient_clipping` in its configuration; and train without `clip`",
            )
        clip_gradients(parameters, self.settings)


def parameters_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def clip_gradients(parameters: list[torch.nn.Parameter], settings: _Settings) -> None:
    """Clip as a recipe says, such as `{"norm": 1.0, "variant": "torch"}`."""
    given = [parameter for parameter in parameters if parameter.grad is not None]
    if "value" in settings:
        clip_grad_value_(given, settings["value"])
    elif "norm" in settings:
        _to_norm(given, settings["norm"], settings.get("variant"))
    else:
        for parameter in given:
            _to_norm([parameter], settings["tensor_norm"], settings.get("variant"))


def _to_norm(parameters: list[torch.nn.Parameter], limit: float, variant: str | None) -> None:
    (scale_to_norm if variant == "optax" else clip_grad_norm_)(parameters, limit)


def clipping_part(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose gradients are clipped: those of copies in float32, where there are such."""
    return optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer


def clip_of(optimizer: Optimizer, given: float | _Settings | None) -> dict[str, Any] | None:
    """What is done to gradients before a step, by the caller's loop or by hooks of ours; other hooks are refused."""
    part = clipping_part(optimizer)
    if part is not optimizer and given is not None:
        raise UnsupportedError(
            "gradients are clipped in the loop, in 16 bits, and the optimizer works on copies in float32",
            hint=f"clip those: `optimizer.inner.register_step_pre_hook({Clip.__module__}.Clip({{'norm': 1.0}}))`",
        )
    hooks = [hook for each in {optimizer, part} for hook in each._optimizer_step_pre_hooks.values()]
    ours = [hook.settings for hook in part._optimizer_step_pre_hooks.values() if isinstance(hook, Clip)]
    if len(ours) < len(hooks) or optimizer._optimizer_step_post_hooks or part._optimizer_step_post_hooks:
        raise UnsupportedError(
            "the optimizer has hooks around its steps, which could do anything",
            hint="remove them, and say what they clip: `clip=1.0`",
        )
    if ours:
        return dict(ours[0])
    if given is None or isinstance(given, Mapping):
        return None if given is None else {**given, **({} if "value" in given else {"variant": "torch"})}
    return {"norm": float(given), "variant": "torch"}
