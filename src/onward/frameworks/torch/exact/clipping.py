"""Clipping of gradients that PyTorch has no function for."""

from __future__ import annotations

from torch import nn


def scale_to_norm(parameters: list[nn.Parameter], limit: float) -> None:
    """Make gradients smaller if their norm is above a limit: g · limit / norm. PyTorch's own adds 1e-6 to the norm."""
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    if norm > limit:
        for parameter in parameters:
            parameter.grad.mul_(limit / norm)
