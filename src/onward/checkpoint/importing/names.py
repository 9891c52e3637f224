"""Names of what optimizers keep, and whether those of the checkpoint and of the graph go together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from onward.checkpoint.description import Checkpoint
from onward.checkpoint.matching import Match
from onward.checkpoint.naming import Order, with_names
from onward.convert.problems import Problems
from onward.convert.snapshot import Snapshot
from onward.errors import list_names
from onward.inspect import describe
from onward.model import Model


def with_optimizer_names(
    checkpoint: Checkpoint,
    matched: Match,
    model: Model,
    base: Snapshot | None,
    given: Sequence[str] | None,
    known: Mapping[str, Order],
) -> tuple[Checkpoint, list[str]]:
    """Return the checkpoint with names for what its optimizers keep, and notes on how these were found."""
    if all(optimizer.has_names for optimizer in checkpoint.optimizers):
        return checkpoint, []
    graph = list(model.graph.initializers)
    learns = {weight.name for weight in describe(model).weights if weight.role not in ("constant", "statistics")}
    stored = [name for name in checkpoint.tensors if matched.names.get(name) in learns]
    place = {ours: graph.index(ours) for ours in matched.names.values()}
    theirs = {ours: name for name, ours in matched.names.items()}
    orders: dict[str, Order] = {"the list that was given": [list(given)]} if given is not None else {}
    if given is None:
        orders = {origin: [[theirs.get(n, n) for n in part] for part in order] for origin, order in known.items()}
    if given is None and base:
        ordered = [sorted((n for n in each.parameters if n in theirs), key=place.__getitem__) for each in base.groups]
        orders["the groups of the training model"] = [[theirs[name] for name in part] for part in ordered]
    if given is None and checkpoint.keeps_order:
        orders["the order of the state of the module"] = [stored]
    if given is None:
        orders["the order of the graph"] = [sorted(stored, key=lambda name: place[matched.names[name]])]
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    optimizers, notes = [], []
    for optimizer in checkpoint.optimizers:
        made, how = with_names(optimizer, orders, shapes)
        optimizers.append(made)
        notes += [how] if how else []
    return dataclasses.replace(checkpoint, optimizers=tuple(optimizers)), notes


def own_constants(matched: Match, model: Model, base: Snapshot | None) -> set[str]:
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
