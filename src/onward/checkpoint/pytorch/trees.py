"""A checkpoint from the trees of PyTorch's files: what nearly all of its frameworks write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytorch.contents import AVERAGED, contents_of, executed_names
from onward.checkpoint.pytorch.optimizers import optimizer_of
from onward.checkpoint.pytorch.schedules import schedule_of
from onward.run_state.state import OptimizerState
from onward.run_state.tensors import Tensor, count_of, is_number

UPDATES = ("global_step", "global_steps", "step", "iteration")
"""What frameworks call the number of updates."""
_COUNTERS = (*UPDATES, "epoch", "max_steps", "num_train_epochs")


def checkpoint_of(path: Path, format: str, title: str, trees: Mapping[str, Any], **facts: Any) -> Checkpoint:
    """What is in trees. `facts` are fields of the checkpoint that are known already."""
    found = contents_of(*trees.values())
    remarks = tuple(facts.pop("remarks", ()))
    tensors = facts.pop("tensors", None)
    if tensors is None:
        tensors = found.modules[0] if found.modules else {}
        if len(found.modules) > 1:
            remarks = (*remarks, f"{len(found.modules)} modules are in it; this is the first")
    optimizers = tuple(map(optimizer_of, found.optimizers))
    group = next((group.settings for each in optimizers for group in each.groups), {})
    known = {
        "optimizers": optimizers,
        "schedules": tuple(schedule_of(state, group) for state in found.schedules),
        "randomness": tuple(found.randomness),
        "scaler": found.scalers[0] if found.scalers else {},
        "data": found.data[0] if found.data else {},
        "averages": _averages(found.averages[0]) if found.averages else {},
        "average_updates": averages_made(found.averages[0]) if found.averages else None,
        "trees": trees,
        "executes": executed_names(trees),
        **facts,
    }
    step = known.pop("step", None)
    if step is None:
        step = step_of(known.get("progress", {}), known["optimizers"])
    kept = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, Tensor)}
    return Checkpoint(path=path, format=format, title=title, tensors=kept, step=step, remarks=remarks, **known)


def _averages(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Averaged parameters, which an `AveragedModel` has under a name more."""
    return {
        name.removeprefix("module."): tensor
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and name.startswith("module.")
    }


def averages_made(state: Mapping[str, Any]) -> int | None:
    """Return how many updates of averages an `AveragedModel` has counted."""
    count = state.get(AVERAGED)
    return count_of(count) if is_number(count) else None


def step_of(progress: Mapping[str, Any], optimizers: Sequence[OptimizerState]) -> int | None:
    """Return the updates made, as the training loop or else the optimizer counts them.

    Steps of a scheduler do not count: loops call it after each update, or after each epoch.
    """
    for name in UPDATES:
        if isinstance(progress.get(name), int):
            return int(progress[name])
    return max((optimizer.count for optimizer in optimizers if optimizer.count is not None), default=None)


def progress_of(tree: Any) -> dict[str, Any]:
    counters = tree if isinstance(tree, Mapping) else {}
    return {name: counters[name] for name in _COUNTERS if isinstance(counters.get(name), int | float)}


def mapping(tree: Any) -> Mapping[str, Any]:
    """A tree that is a mapping; nothing if it is none."""
    return tree if isinstance(tree, Mapping) else {}
