"""Which optimizers of PyTorch are known to the last digit for parameters in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from onward.frameworks.torch.exact.optimizer import ExactOptimizer
from onward.recipe.optimizers import ConfiguredOptimizer

HALVES = (torch.float16, torch.bfloat16)

_FOREACH_AS_ONE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax)
"""Classes whose implementation for many tensors rounds bfloat16 where that for one does."""


def in_16_bits(parameter: Parameter) -> str:
    return str(parameter.dtype).removeprefix("torch.")


def is_known_in_half(configured: ConfiguredOptimizer) -> bool:
    """Whether the update of a recipe rounds as an optimizer of torch.optim does."""
    update = configured.kind.choose(configured.settings, None).update
    is_native = configured.options["variant"] == "torch" and configured.kind.name != "sgdw"
    return is_native and configured.options.get("fused", False) in update.in_16_bits


def objection(
    part: Optimizer, settings: Mapping[str, Any], configured: ConfiguredOptimizer, dtype: torch.dtype
) -> tuple[str, str] | None:
    """Why an update of 16 bits cannot be carried over exactly, and what to do."""
    kind = type(part).__name__
    if settings.get("fused") and "fused" not in configured.options:
        return f"the fused kernel of {kind} rounds in its own way", "say `fused=False`"
    if isinstance(part, ExactOptimizer) or not is_known_in_half(configured):
        return f"{kind} rounds in its own way", "let it work on copies in float32, or take AdamW or SGD"
    if settings.get("foreach") and (dtype != torch.bfloat16 or not isinstance(part, _FOREACH_AS_ONE)):
        return f"{kind} rounds otherwise with `foreach=True`", "say `foreach=False`"
    for setting in ("capturable", "differentiable"):
        if settings.get(setting):
            return f"{kind} rounds otherwise with `{setting}=True`", f"say `{setting}=False`"
    return None
