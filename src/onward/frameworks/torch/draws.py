"""Random numbers of PyTorch without randomness, for comparisons with a graph that has fixed draws as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onward.agreement.steps import FACTOR, MODULUS, OFFSET

aten = torch.ops.aten


def _fixed(draw: Tensor) -> Tensor:
    """Return the numbers of `with_fixed_draws`, from 0 to 1, in the shape of a draw."""
    numbers = (torch.arange(draw.numel()) * FACTOR + OFFSET) % MODULUS
    return (numbers.float() / MODULUS).reshape(draw.shape)


def _normal(draw: Tensor, mean: Any = 0.0, scale: Any = 1.0, *_: Any, **__: Any) -> Tensor:
    return draw.copy_(_fixed(draw) * (math.sqrt(12) * scale) + (mean - math.sqrt(12) * scale / 2))


def _integers(draw: Tensor, *arguments: Any, **_: Any) -> Tensor:
    low, high = (0, *(x for x in arguments if isinstance(x, int)))[-2:]
    return draw.copy_((_fixed(draw) * (high - low) + low).floor())


_FIXED: Mapping[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((aten.rand, aten.rand_like), lambda draw, *_, **__: draw.copy_(_fixed(draw))),
    **dict.fromkeys((aten.randn, aten.randn_like), lambda draw, *_, **__: _normal(draw)),
    **dict.fromkeys((aten.randint, aten.randint_like), _integers),
    aten.randperm: lambda draw, *_, **__: draw.copy_(_fixed(draw).argsort()),
    aten.normal: _normal,
    aten.normal_: lambda draw, _, *moments, **__: _normal(draw, *moments),
    aten.uniform_: lambda draw, _, low=0.0, high=1.0, **__: draw.copy_(_fixed(draw) * (high - low) + low),
    aten.exponential_: lambda draw, _, rate=1.0, **__: draw.copy_(_fixed(draw).log() / -rate),
    aten.bernoulli: lambda draw, p, *_, **__: draw.copy_(_fixed(draw) < p),
}
"""Operators -> functions of what they drew and of their arguments."""


class FixedDraws(TorchDispatchMode):  # type: ignore[misc]
    """Mode in which each draw returns the same sequence of numbers."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, fixed = function(*args, **(kwargs or {})), _FIXED.get(function.overloadpacket)
        return result if fixed is None else fixed(result, *args, **(kwargs or {}))
