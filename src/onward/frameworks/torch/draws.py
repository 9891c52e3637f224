"""Random numbers of PyTorch without randomness, for comparisons with a graph that has the means of its draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def _middle(draw: Tensor, *arguments: Any, low: int | None = None, high: int | None = None, **_: Any) -> Tensor:
    bounds = [x for x in arguments if isinstance(x, int)]
    return draw.fill_(sum(bounds if bounds[1:] else (0, *bounds)) // 2)


def _moments(draw: Tensor, mean: Any = 0.0, *_: Any, **__: Any) -> Tensor:
    return draw.copy_(mean) if isinstance(mean, Tensor) else draw.fill_(mean)


_MEANS: Mapping[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((aten.rand, aten.rand_like), lambda draw, *_, **__: draw.fill_(0.5)),
    **dict.fromkeys((aten.randn, aten.randn_like), lambda draw, *_, **__: draw.zero_()),
    **dict.fromkeys((aten.randint, aten.randint_like), _middle),
    aten.randperm: lambda draw, *_, **__: draw.copy_(torch.arange(len(draw))),
    aten.normal: _moments,
    aten.normal_: lambda draw, _, mean=0.0, *__, **___: draw.fill_(mean),
    aten.uniform_: lambda draw, _, low=0.0, high=1.0, **__: draw.fill_((low + high) / 2),
    aten.exponential_: lambda draw, _, rate=1.0, **__: draw.fill_(math.log(2) / rate),  # -log(0.5) / rate
    aten.bernoulli: lambda draw, p, *_, **__: draw.copy_(p > 0.5),  # a uniform number is less
}
"""Operators -> functions of what they drew and of their arguments."""


class MeanDraws(TorchDispatchMode):  # type: ignore[misc]
    """Mode in which uniform numbers are 0.5, normal ones 0, and others what these give."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, mean = function(*args, **(kwargs or {})), _MEANS.get(function.overloadpacket)
        return result if mean is None else mean(result, *args, **(kwargs or {}))
