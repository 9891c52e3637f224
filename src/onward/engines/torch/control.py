"""Control flow in Python, and an `If` that can be compiled although it depends on values."""

from __future__ import annotations

import torch

from onward.engines.framework import NotOnHost, Operators
from onward.engines.shared.control import branch
from onward.engines.torch.types import is_fake

operators = Operators()


@operators.define("If")
def traced_branch(condition, *, then_branch, else_branch, framework):
    """Run both branches during tracing and select their results, as accumulated gradients need it.

    Not within a derivative: the branch that is not taken could add 0 * infinity to a gradient.
    """
    if not torch.is_tensor(condition) or not is_fake(condition):
        return branch(condition, then_branch=then_branch, else_branch=else_branch, framework=framework)
    if torch.is_grad_enabled():
        raise NotOnHost
    pairs = [tuple(map(framework.place, pair)) for pair in zip(then_branch(), else_branch(), strict=True)]
    if any(x.shape != y.shape for x, y in pairs):
        raise NotOnHost
    return tuple(framework.operators["Where"](condition.reshape(()), x, y) for x, y in pairs)
