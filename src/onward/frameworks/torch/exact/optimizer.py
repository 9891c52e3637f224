"""What all exact optimizers share: the loop over parameters, weight decay, and state that begins at zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


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
