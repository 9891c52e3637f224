"""Modules with any forward pass, and the steps that train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """Modules, parameters and buffers by name, and a forward pass that takes the module first."""

    def __init__(self, forward: Callable[..., Any], **tensors: Any) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Module | nn.Parameter):
                setattr(self, name, tensor)
            else:
                self.register_buffer(name, tensor)
        self._forward = forward

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._forward(self, *inputs, **named)


def step(loss: torch.Tensor, optimizer: Any) -> float:
    """Make one update, and return the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())
