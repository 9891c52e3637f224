"""Parameters in 16 bits whose optimizer works on copies in float32, as DeepSpeed, Megatron and Apex have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from onward.frameworks.torch.exact.optimizer import evaluate


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
        changed = [(x, copy) for x, copy in self._apart() if x.grad is not None]
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
                self._hold(x, dict(state_dict["state"][number]))
        self._show()

    def _hold(self, x: Parameter, state: dict[str, Any]) -> None:
        copy = self.copies[x]
        if "master" in state:
            copy.copy_(state.pop("master"))
            x.copy_(copy)
        self.inner.state[copy] = {slot: _copy_slot(slot, value, copy) for slot, value in state.items()}

    def _show(self) -> None:
        """Let the state be what the inner optimizer has now."""
        for x, copy in self.copies.items():
            master = {} if x is copy else {"master": copy.detach()}
            self.state[x] = {**self.inner.state.get(copy, {}), **master}

    def _apart(self) -> list[tuple[Parameter, Parameter]]:
        return [(x, copy) for x, copy in self.copies.items() if x is not copy]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "inner": self.inner, "copies": self.copies}


def _settle(given: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Give groups the settings of others."""
    for one, other in zip(given, groups, strict=True):
        other.update({key: value for key, value in one.items() if key != "params"})


def _copy_slot(slot: str, value: Any, like: Tensor) -> Any:
    """A copy of a slot, in the type of what it is kept beside."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if slot == "step" else value.to(like, copy=True)
