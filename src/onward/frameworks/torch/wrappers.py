"""What Hugging Face's Accelerate, and others like it, put around optimizers and schedulers, taken off again.

Such a wrapper is known by its structure, so that nothing needs to be installed: it holds no groups of parameters, or is
no scheduler, but has an attribute that does or is.
"""

from __future__ import annotations

import copy
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onward.errors import UnsupportedError
from onward.run_state.problems import Problems


def bare_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer inside of a wrapper, if that does nothing else; or what was given."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer) and "param_groups" not in vars(
        optimizer
    ):
        _check(optimizer)
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedError(
            f"{optimizer!r} is no optimizer of PyTorch", hint="give one: `torch.optim.AdamW(module.parameters())`"
        )
    return optimizer


def bare_scheduler(scheduler: Any) -> Any:
    """The scheduler inside of a wrapper, with the bare optimizer; or what was given."""
    while not isinstance(scheduler, LRScheduler) and hasattr(scheduler, "scheduler"):
        scheduler = scheduler.scheduler
    held = getattr(scheduler, "optimizer", None)
    if not isinstance(held, Optimizer) or (bare := bare_optimizer(held)) is held:
        return scheduler
    made = copy.copy(scheduler)
    made.optimizer = bare
    return made


def _check(wrapper: Any) -> None:
    problems = Problems(f"the wrapper {type(wrapper).__name__} of the optimizer")
    inside = "give the optimizer inside, `optimizer.optimizer`, and leave that to the loop"
    batches = getattr(getattr(wrapper, "gradient_state", None), "num_steps", 1)
    if batches != 1:
        problems.add(f"it accumulates the gradients of {batches} batches", inside)
    if getattr(wrapper, "scaler", None) is not None:
        problems.add("it scales the loss", inside)
    problems.refuse()
