"""States of modules, optimizers and schedulers of PyTorch as they are saved, both ways. State names no class:
what it keeps tells which it can be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytorch.pickling import Attributed, Name, Object
from onward.errors import UnsupportedError
from onward.recipe.optimizers import configure
from onward.recipe.spec import Spec
from onward.run_state.state import COUNT, MASTER, OptimizerState, ParameterGroup, SchedulerState
from onward.run_state.tensors import ArrayTensor, Tensor, as_tensor, count_of, number_of
from onward.vocabulary.optimizers import TORCH_ROWS
from onward.vocabulary.rate_formulas import FOREVER, complete, in_words
from onward.vocabulary.rows import row_for
from onward.vocabulary.torch import FLAGS, families_of, saved_words
from onward.vocabulary.torch_schedules import Attributes, class_of, read_saved, restart_position

# ---- optimizers ------------------------------------------------------------------------------------------------------

Settings = Mapping[str, Any]


def is_optimizer_state(tree: Any) -> bool:
    """True if a tree is the state of an optimizer of PyTorch."""
    if not isinstance(tree, Mapping) or not isinstance(tree.get("state"), Mapping):
        return False
    groups = tree.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return False
    # Optimizers list parameters by number, in distributed checkpoints by name.
    listed = [group.get("params") for group in groups]
    return all(isinstance(each, list) and all(isinstance(x, int | str) for x in each) for each in listed)


def optimizer_of(tree: Mapping[str, Any], family: str | None = None) -> OptimizerState:
    """The optimizer that saved this; `family` is which it is, where something else says so."""
    groups: list[ParameterGroup] = []
    names: dict[Any, Any] = {}
    for group in tree["param_groups"]:
        numbers = group["params"]
        known = group.get("param_names")
        named = known if isinstance(known, list) and len(known) == len(numbers) else numbers
        names |= dict(zip(numbers, named, strict=True))
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(ParameterGroup(None, tuple(named), settings))
    slots = {
        names.get(key, key): {slot: value for slot, value in kept.items() if value is not None}
        for key, kept in tree["state"].items()
        if isinstance(kept, Mapping)
    }
    states = {frozenset(map(str, kept)) - {COUNT, MASTER} for kept in slots.values()}
    families = (family,) if family else families_of(states, groups[0].settings if groups else {})
    if len(families) == 1:
        groups = [dataclasses.replace(group, optimizer=spec_of(families[0], group.settings)) for group in groups]
    return OptimizerState(families, tuple(groups), slots)


def spec_of(family: str, settings: Settings) -> Spec | None:
    """Return the words of a recipe for a group of PyTorch; None if there are none."""
    return saved_words(family, settings, base_rate(settings), number_of)


def base_rate(settings: Settings) -> float:
    """The rate that a schedule multiplies: before it, or at the top of one cycle."""
    rate = settings.get("max_lr", settings.get("initial_lr", settings.get("lr", 0.0)))
    return float(rate if isinstance(rate, int) else number_of(rate))


def settings_of(spec: Spec, rate: float) -> dict[str, Any]:
    """The settings that PyTorch's own class has for the words of a recipe. `rate` is the rate at the moment."""
    configured = configure(spec)
    row = row_for((row for row in TORCH_ROWS if row.is_native), configured)
    if row is None:
        raise UnsupportedError(
            f"PyTorch has no optimizer of its own that computes what `{spec}` does",
            hint="write the run with a program of its own: `onward convert training.onnx --to torch --program`, or use "
            "`variant=torch` from the beginning",
        )
    return {**{flag: FLAGS[flag] for flag in row.flags}, **row.settings_for(configured), "lr": rate}


# ---- schedulers ------------------------------------------------------------------------------------------------------


def is_schedule_state(tree: Any) -> bool:
    return isinstance(tree, Mapping) and "_last_lr" in tree and ("last_epoch" in tree or "_schedulers" in tree)


def schedule_of(state: Attributes, group: Attributes | None = None) -> SchedulerState:
    """What the state of a scheduler says; the rates of one cycle are in a group of its optimizer."""
    pieces = read_saved(_plain(state), group or {})
    words = None if pieces is None else tuple(in_words(pieces))
    position = state.get("last_epoch")
    if position is None and isinstance(inner := state.get("_schedulers"), list) and inner:
        position = inner[0].get("last_epoch") if isinstance(inner[0], Mapping) else None
    return SchedulerState(state, words, position if isinstance(position, int) else None)


def _plain(state: Attributes) -> Attributes:
    """Return a state with plain counters in place of objects."""
    state = dict(state)
    if isinstance(counts := state.get("milestones"), Object):
        state["milestones"] = counts.arguments[0]
    if isinstance(inner := state.get("_schedulers"), list):
        state["_schedulers"] = [_plain(each) if isinstance(each, Mapping) else each for each in inner]
    return state


def state_of(words: Sequence[Spec], bases: Sequence[float], rates: Sequence[float], position: int) -> dict[str, Any]:
    """The state of a scheduler of PyTorch at a position: its own class where there is one, else that of LambdaLR.

    `bases` are the rates of the groups before the schedule, `rates` those at the position. What LambdaLR multiplies
    with is never stored: whoever loads the state has the function.
    """
    common = {
        "base_lrs": list(bases),
        "last_epoch": position,
        "_step_count": position + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": list(rates),
    }
    single = [(spec, FOREVER) for spec in words if len(words) == 1 and "until" not in spec.options]
    found = class_of(complete(single)[0]) if single else None
    if found is None:
        return {**common, "lr_lambdas": [None] * len(bases)}
    state = found[1]
    if "milestones" in state:
        counts = {step: state["milestones"].count(step) for step in state["milestones"]}
        state["milestones"] = Object(Name("collections", "Counter"), (counts,))
    if "T_0" in state:
        state |= restart_position(state["T_0"], state["T_mult"], position)
    return {**state, **common}


def advance_state(state: Mapping[str, Any], rates: Sequence[float], position: int) -> dict[str, Any]:
    """The state of a scheduler that is there, at another position; `rates` are those of the groups then."""
    if state.get("last_epoch") == position:
        return dict(state)
    moved = dict(state)
    if len(rates) == len(state.get("_last_lr", rates)):
        moved["_last_lr"] = list(rates)
    if isinstance(inner := state.get("_schedulers"), list):
        moved["_schedulers"] = [_inner(state, at, rates, position) for at in range(len(inner))]
    if "last_epoch" in state:
        moved["last_epoch"] = position
    if "_step_count" in state:
        moved["_step_count"] = position + 1
    if "T_cur" in state:
        moved |= restart_position(state["T_0"], state["T_mult"], position)
    return moved


def _inner(state: Mapping[str, Any], at: int, rates: Sequence[float], position: int) -> Any:
    """A scheduler inside another: each has its turn where there are milestones, else all move together."""
    milestones = state.get("_milestones")
    inner = state["_schedulers"][at]
    if milestones is None:
        return advance_state(inner, rates, position)
    start = milestones[at - 1] if at else 0
    end = milestones[at] if at < len(milestones) else FOREVER
    return advance_state(inner, rates, position - start) if start <= position < end else inner


# ---- writing ---------------------------------------------------------------------------------------------------------


_COUNTERLESS = {name for row in TORCH_ROWS if not row.counts for name in row.optimizers}


def module_state(checkpoint: Checkpoint) -> Attributed:
    """`module.state_dict()`."""
    aliases = {alias: checkpoint.tensors[name] for alias, name in checkpoint.tied.items() if name in checkpoint.tensors}
    return Attributed({**checkpoint.tensors, **aliases})


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
        if step is not None and spec is None:
            kept = {COUNT: as_tensor(step), **kept}
        elif step is not None and spec is not None and spec.name not in _COUNTERLESS:
            kept = {COUNT: ArrayTensor(np.asarray(count_of(step), np.float32)), **kept}
        state[numbers[name]] = kept
    ordered = {number: state[number] for number in dict.fromkeys(numbers.values()) if number in state}
    groups = []
    for group in optimizer.groups:
        params = [numbers[name] for name in group.parameters]
        groups.append({**settings_now(group), "params": params, **({"param_names": params} if by_name else {})})
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
