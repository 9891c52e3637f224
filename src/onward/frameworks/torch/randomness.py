"""Chance in a forward pass: where it decides nothing, and how it is turned off."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from onward.errors import UnsupportedError


class NeverBelowZero(TorchFunctionMode):  # type: ignore[misc]
    """Answers whether a number from `torch.rand` is below 0, as modules ask that leave out layers with probability 0.

    Without an answer the exporter takes it for a decision by values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._drawn: dict[int, torch.Tensor] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.lt and id(args[0]) in self._drawn and _is_zero(args[1]):
            return False
        if function is F.l1_loss:
            _refuse_weight()
        result = function(*args, **(kwargs or {}))
        if function is torch.rand and result.ndim == 0:
            self._drawn[id(result)] = result  # which keeps its id from being used again
        return result


def _refuse_weight() -> None:
    """Refuse the `weight` of a call of `l1_loss` that is on the stack: PyTorch does not hand it to modes such as these.

    Its exporter traces by them, and the comparison with the module runs under one: both would leave it out.
    """
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code is F.l1_loss.__code__ and frame.f_locals.get("weight") is not None:
            raise UnsupportedError(
                "PyTorch drops the `weight` of `l1_loss` while it traces",
                hint="write it out: `((x - y).abs() * weight).sum() / weight.sum()`",
            )


def _is_zero(limit: Any) -> bool:
    return isinstance(limit, int | float) and limit <= 0


class NothingDropped(TorchFunctionMode):  # type: ignore[misc]
    """Leaves out dropout, also where a module calls it as a function."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if function in _DROPOUTS:
            return args[0] if args else given["input"]
        if function is torch.Tensor.bernoulli_:
            return args[0].fill_(given.get("p", (*args[1:], 0.5)[0]))
        if function is F.scaled_dot_product_attention:
            args, given = args[:4], {**given, **dict(zip(_AFTER_MASK, args[4:], strict=False)), "dropout_p": 0.0}
        return function(*args, **given)


_DROPOUTS = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.feature_dropout, torch.alpha_dropout),
)
_AFTER_MASK = ("dropout_p", "is_causal")
"""Arguments of attention that may be given by position, after queries, keys, values and the mask."""
