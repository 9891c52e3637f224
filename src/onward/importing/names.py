"""Names of what optimizers keep, and whether those of the checkpoint and of the graph go together."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from onward.checkpoint.format import Checkpoint, Order
from onward.checkpoint.matching import Match
from onward.checkpoint.naming import NOT_PROVEN, TRAINER, Shapes, stored_shapes, with_names
from onward.errors import list_names
from onward.inspect import describe
from onward.model import Model
from onward.recipe.spec import Spec
from onward.run_state.problems import Problems
from onward.run_state.state import Group, Optimizer, RunState


def with_optimizer_names(
    checkpoint: Checkpoint,
    matched: Match,
    model: Model,
    base: RunState | None,
    given: Sequence[str] | None,
    known: Mapping[str, Order],
) -> tuple[Checkpoint, dict[str, bool]]:
    """Return the checkpoint with names for what its optimizers keep, and notes on how these were found.

    A note has True if it is on an assumption that changes numbers where it is wrong.
    """
    if all(optimizer.has_names for optimizer in checkpoint.optimizers):
        return checkpoint, {}
    graph = list(model.graph.initializers)
    learns = {weight.name for weight in describe(model).weights if weight.role not in ("constant", "statistics")}
    stored = [name for name in checkpoint.tensors if matched.names.get(name) in learns]
    place = {ours: graph.index(ours) for ours in matched.names.values()}
    theirs = {ours: name for name, ours in matched.names.items()}
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    in_trainer = checkpoint.format == TRAINER
    optimizers, notes = [], dict[str, bool]()
    for optimizer in checkpoint.optimizers:
        orders: dict[str, Order] = {}
        if given is not None:
            orders["the list that was given"] = _by_group(given, optimizer)
        else:
            for origin, order in known.items():
                if in_trainer or len(order) == 1:  # only the Trainer is known to divide parameters as it does
                    orders[origin] = [[theirs.get(name, name) for name in part] for part in order]
            if base:
                place_there = {theirs[name]: at for name, at in place.items()}
                if checkpoint.keeps_order:
                    place_there = {name: at for at, name in enumerate(checkpoint.tensors)}
                parts = [
                    (each, sorted((theirs[n] for n in each.parameters if n in theirs), key=place_there.__getitem__))
                    for each in base.groups
                ]
                if order := _as_grouped(optimizer, parts, shapes):
                    orders["the groups of the training model"] = order
            if checkpoint.keeps_order:
                orders["the order of the state of the module"] = [stored]
            orders["the order of the graph"] = [sorted(stored, key=lambda name: place[matched.names[name]])]
        named, how = with_names(optimizer, orders, shapes, in_trainer=in_trainer)
        optimizers.append(named)
        notes |= {how: how.endswith(NOT_PROVEN)} if how else {}
    return dataclasses.replace(checkpoint, optimizers=tuple(optimizers)), notes


def _by_group(names: Sequence[str], optimizer: Optimizer) -> Order:
    """Divide names as the groups of an optimizer are, if their number agrees."""
    sizes = [len(group.parameters) for group in optimizer.groups]
    if sum(sizes) != len(names):
        return [list(names)]
    ends = list(itertools.accumulate(sizes))
    return [list(names[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _as_grouped(optimizer: Optimizer, parts: Sequence[tuple[Group, list[str]]], shapes: Shapes) -> Order:
    """Return parts in the order of the groups of an optimizer, or none where that is not certain.

    A group has the size and the shapes of its part. Where several do, the settings in which groups differ tell: all of
    them, or all but the rate.
    """
    stored = stored_shapes(optimizer)
    settings = [
        group.spec.options if group.optimizer else {"lr": group.settings.get("lr"), **group.numbers}
        for group in optimizer.groups
    ]
    varying = {key for each in settings for key in each if any(each[key] != other.get(key) for other in settings)}

    def fits(group: Group, settings: Mapping[str, Any], part: tuple[Group, list[str]], keys: set[str]) -> bool:
        run_group, names = part
        if len(names) != len(group.parameters):
            return False
        pairs = zip(group.parameters, names, strict=True)
        if any(stored.get(number, shapes[name]) != shapes[name] for number, name in pairs):
            return False
        ours = run_group.spec.options if isinstance(run_group.optimizer, Spec) else {}
        return all(_is_close(settings.get(key, 0), ours.get(key, 0)) for key in keys)  # training models omit zeros

    for keys in (varying, varying - {"lr"}, set[str]()):
        chosen = [
            [i for i, part in enumerate(parts) if fits(group, numbers, part, keys)]
            for group, numbers in zip(optimizer.groups, settings, strict=True)
        ]
        if all(len(each) == 1 for each in chosen) and len({each[0] for each in chosen}) == len(parts):
            return [parts[i][1] for (i,) in chosen]
    return [parts[0][1]] if len(parts) == 1 else []


def _is_close(one: Any, other: Any) -> bool:
    """True if two settings are the same, one of which may have been a float32."""
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other, rel_tol=1e-6) if numbers else bool(one == other)


def own_constants(matched: Match, model: Model, base: RunState | None) -> set[str]:
    """Tensors that a training model neither trains nor averages, while the checkpoint has nothing left over."""
    if base is None or matched.left:
        return set()
    changing = {weight.name for weight in describe(model).weights if weight.role == "statistics"}
    return {name for name in matched.absent if name not in changing | {*base.parameters}}


def refuse_unmatched(checkpoint: Checkpoint, matched: Match, constants: set[str]) -> None:
    problems = Problems("the names of the checkpoint and of the model")
    hint = "give pairs: `--names FILE` (JSON), or `names={...}`; or the model that the checkpoint is of"
    if absent := [name for name in matched.absent if name not in constants]:
        problems.add(f"the checkpoint has no {list_names(absent, 8)}", hint)
    optimized = {name for optimizer in checkpoint.optimizers for name in optimizer.slots}
    lost = [name for name in matched.left if name in optimized]
    if lost or (matched.absent and matched.left):
        problems.add(f"the model has no {list_names(lost or matched.left, 8)}", hint)
    problems.refuse()
