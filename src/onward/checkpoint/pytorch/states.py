"""States of modules and optimizers as PyTorch saves them, of what a checkpoint holds; and trees brought up to date."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytorch.objects import Attributed
from onward.checkpoint.pytorch.optimizers import FLAGS, is_optimizer_state, settings_of, with_step
from onward.checkpoint.pytorch.schedules import is_schedule_state
from onward.errors import UnsupportedError
from onward.run_state.state import COUNT, MASTER, OptimizerState, ParameterGroup
from onward.run_state.tensors import ArrayTensor, Tensor, as_tensor, count_of


def module_state(checkpoint: Checkpoint) -> Attributed:
    """`module.state_dict()`."""
    return Attributed({**checkpoint.tensors, **_aliases(checkpoint)})


def _aliases(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {alias: checkpoint.tensors[name] for alias, name in checkpoint.tied.items() if name in checkpoint.tensors}


def optimizer_state(optimizer: OptimizerState, *, by_name: bool = False) -> dict[str, Any]:
    """`optimizer.state_dict()`: by numbers in the order of the groups, or by name, as distributed checkpoints are."""
    refuse_unknown_class(optimizer)
    numbers: dict[Any, Any] = {}
    for group in optimizer.groups:
        for name in group.parameters:
            numbers[name] = name if by_name else len(numbers)
    specs = {name: group.spec if group.optimizer else None for group in optimizer.groups for name in group.parameters}
    state = {}
    for name, slots in optimizer.slots.items():
        spec = specs.get(name)
        if name not in numbers or not slots:
            continue
        if MASTER in slots:
            raise UnsupportedError(
                "the optimizer works on float32 copies of weights, of which PyTorch's own optimizers have none",
                hint="write it for `deepspeed` or `megatron`, or import it with a model in float32",
            )
        kept = {slot: as_tensor(value) for slot, value in slots.items() if slot != COUNT}
        step = slots.get(COUNT)
        if spec is not None and step is not None:
            kept = with_step(spec, kept, count_of(step))
        elif step is not None:
            kept = {COUNT: as_tensor(step), **kept}
        state[numbers[name]] = kept
    ordered = {number: state[number] for number in dict.fromkeys(numbers.values()) if number in state}
    groups = [{**settings_now(group), **_members(group, numbers, by_name)} for group in optimizer.groups]
    return {"state": ordered, "param_groups": groups}


def refuse_unknown_class(optimizer: OptimizerState) -> None:
    """Raise an UnsupportedError for state of another framework that does not name its optimizer.

    `Adam.step()` of PyTorch needs settings and a step for each parameter, which such state does not have.
    """
    if optimizer.variant != "torch" and any(group.optimizer is None for group in optimizer.groups):
        raise UnsupportedError(
            "the checkpoint does not name its optimizer, which PyTorch needs",
            hint="name it in a training model: `onward convert CHECKPOINT --like model.onnx --optimizer adamw:lr=1e-3 "
            "-o run.onnx`; to write weights alone: `--to safetensors`",
        )


def _members(group: ParameterGroup, numbers: Mapping[Any, Any], by_name: bool) -> dict[str, Any]:
    params = [numbers[name] for name in group.parameters]
    return {"params": params, "param_names": params} if by_name else {"params": params}


_OF_PYTORCH = frozenset(
    {"maximize", "foreach", "betas", "dampening", "centered", "rho", "lr_decay", "etas", "lambd", "bias_correction"}
)
"""Names of settings, of which each of PyTorch's optimizers has one, and those of other frameworks have none."""


def settings_now(group: ParameterGroup) -> dict[str, Any]:
    """The settings of a group: those that were stored, with numbers as they are now."""
    if group.optimizer is None:
        return dict(group.settings)
    rate = group.rate if group.rate is not None else group.settings.get("lr", group.spec.options["lr"])
    if _OF_PYTORCH.isdisjoint(group.settings):
        base = float(group.spec.options["lr"])
        return {**settings_of(group.spec, rate), **({"initial_lr": base} if rate != base else {})}
    if group.rate is None:
        return dict(group.settings)
    fresh = settings_of(group.spec, rate)
    changed = {
        key: value
        for key, value in fresh.items()
        if key in group.settings and key not in FLAGS and value != group.settings[key]
    }
    base = float(group.spec.options["lr"])
    is_stored = base == group.settings.get("lr")  # which stays where the checkpoint has no schedule
    if "initial_lr" in group.settings and "max_lr" not in group.settings and not is_stored:
        changed["initial_lr"] = base
    return {**group.settings, **changed}


def without_copies(held: Mapping[str, Any], weight: Tensor | None) -> dict[str, Any]:
    """Slots without a copy of the weight that is as wide as it."""
    is_copy = weight is not None and MASTER in held and held[MASTER].dtype == weight.dtype
    return {slot: value for slot, value in held.items() if slot != MASTER or not is_copy}


def up_to_date(trees: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """The trees that a checkpoint keeps, with optimizers, schedules and counters as they are now."""
    optimizers = iter(checkpoint.optimizers)
    schedules = iter(checkpoint.schedules)
    return {name: _renew_tree(tree, optimizers, schedules, checkpoint, 4) for name, tree in trees.items()}


def advance_counter(name: Any, value: Any, by: int) -> Any:
    """The counter of batches of a BatchNorm after more of them; everything else as it is."""
    if not by or not isinstance(value, Tensor) or not str(name).endswith("num_batches_tracked"):
        return value
    return ArrayTensor(np.asarray(value.array() + by))


def _renew_tree(
    tree: Any, optimizers: Iterator[OptimizerState], schedules: Iterator[Any], now: Checkpoint, depth: int
) -> Any:
    """The walk is that of `contents_of`, so that the parts come in the same order."""
    if is_optimizer_state(tree):
        made = optimizer_state(next(optimizers))
        groups = [
            {key: before[key] if key in ("params", "param_names") else group[key] for key in before}
            for group, before in zip(made["param_groups"], tree["param_groups"], strict=True)
        ]
        numbers = [number for group in tree["param_groups"] for number in group["params"]]
        state = {numbers[at] if at < len(numbers) else at: kept for at, kept in made["state"].items()}
        return type(tree)({**tree, "state": state, "param_groups": groups})
    if is_schedule_state(tree):
        return dict(next(schedules).state)
    if depth and isinstance(tree, Mapping):
        inside = {
            key: advance_counter(key, _renew_tree(value, optimizers, schedules, now, depth - 1), now.since)
            for key, value in tree.items()
        }
        if depth == 4:
            inside |= {key: value for key, value in now.progress.items() if key in tree}
        if isinstance(tree, Attributed):
            made_again = Attributed(inside)
            made_again.attributes = tree.attributes
            return made_again
        return inside
    if depth and isinstance(tree, list):
        return [_renew_tree(item, optimizers, schedules, now, depth - 1) for item in tree]
    return tree
