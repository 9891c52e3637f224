"""Names of what an optimizer keeps, where a checkpoint has only numbers.

PyTorch numbers parameters in the order in which an optimizer was given them. Within a group, that is the order of the
module. Which parameters are in which group is known if somebody says it, or if the shapes of what the optimizer keeps
leave one way to divide them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from onward.checkpoint.format import Checkpoint, Order
from onward.errors import UnsupportedError, list_names
from onward.run_state.state import Optimizer
from onward.run_state.tensors import Tensor

_WITHOUT_DECAY = [
    re.compile(pattern)
    for pattern in ("bias", "layernorm", "layer_norm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
]
"""Names of parameters that the Trainer of transformers puts into its second group."""

TRAINER = "hf"
"""The format of the Trainer of transformers."""

Shapes = Mapping[str, tuple[int, ...]]


def with_names(
    optimizer: Optimizer, orders: Mapping[str, Order], shapes: Shapes, *, in_trainer: bool = False
) -> tuple[Optimizer, str]:
    """Return an optimizer with names for its parameters, and how they were found.

    Args:
        optimizer: What has numbers.
        orders: In which parameters may have been given to it, by what they come from. One with a part for each group
            says which parameters are in which.
        shapes: Of all parameters.
        in_trainer: Whether the Trainer of transformers made its groups.

    Raises:
        UnsupportedError: no order fits, or several ways to divide it into groups do.
    """
    if optimizer.has_names:
        return optimizer, ""
    numbers = [number for group in optimizer.groups for number in group.parameters]
    reasons = []
    for origin, order in (_with_groups_of_trainer(orders, optimizer) if in_trainer else orders).items():
        named, proof = _divided(order, optimizer, shapes)
        if named is not None:
            made = _rename_slots(optimizer, dict(zip(numbers, named, strict=True)))
            return made, f"parameters of the optimizer are named by {origin}; {proof}"
        reasons.append(f"{origin}: {proof}")
    raise UnsupportedError(
        f"the optimizer keeps {len(numbers)} parameters by number, and their names are not stored",
        hint="give them in its order: `--names FILE` with a name in each line, or `names=[...]`; or a training model "
        "with its groups: `like=...`; " + "; ".join(reasons),
    )


def stored_shapes(optimizer: Optimizer) -> dict[str | int, tuple[int, ...]]:
    """Return shapes of parameters as far as slots show them."""
    return {
        name: kept.shape
        for name, slots in optimizer.slots.items()
        for slot, kept in slots.items()
        if slot in _ELEMENTWISE and isinstance(kept, Tensor)
    }


_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def with_own_names(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint whose optimizers have names, where its own tensors are in the order of the module."""
    if all(optimizer.has_names for optimizer in checkpoint.optimizers):
        return checkpoint
    if not checkpoint.keeps_order:
        raise UnsupportedError(
            f"`{checkpoint.path}` has no names for what its optimizer keeps, and its tensors are not in their order",
            hint="make a training model of it first: `onward convert ... --like model.onnx`",
        )
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    order = [name for name in checkpoint.tensors if not name.endswith(_BUFFERS)]
    orders = {"the order of the state of the module": [order]}
    named = tuple(
        with_names(optimizer, orders, shapes, in_trainer=checkpoint.format == TRAINER)[0]
        for optimizer in checkpoint.optimizers
    )
    return dataclasses.replace(checkpoint, optimizers=named)


def _with_groups_of_trainer(orders: Mapping[str, Order], optimizer: Optimizer) -> dict[str, Order]:
    """Return orders, each behind its division by names into those with weight decay and those without."""
    sizes = [len(group.parameters) for group in optimizer.groups]
    found: dict[str, Order] = {}
    for origin, order in orders.items():
        names = [name for part in order for name in part]
        plain = [name for name in names if any(pattern.search(name.lower()) for pattern in _WITHOUT_DECAY)]
        decayed = [name for name in names if name not in set(plain)]
        if len(order) == 1 and sizes == [len(decayed), len(plain)]:
            found[f"{origin}, those without weight decay behind the others"] = [decayed, plain]
        found[origin] = order
    return found


def _divided(order: Order, optimizer: Optimizer, shapes: Shapes) -> tuple[list[str] | None, str]:
    """Return the names of an order as groups have them and a proof, or None and why the order does not do."""
    sizes = [len(group.parameters) for group in optimizer.groups]
    numbers = [number for group in optimizer.groups for number in group.parameters]
    names = [name for part in order for name in part]
    if len(names) != len(numbers) or (len(order) > 1 and sizes != [len(part) for part in order]):
        return None, f"{' and '.join(str(len(part)) for part in order)} parameters"
    stored = stored_shapes(optimizer)
    others = [name for name, n in zip(names, numbers, strict=True) if n in stored and stored[n] != shapes.get(name)]
    first = optimizer.groups[0]
    is_alike = all((each.settings, each.optimizer) == (first.settings, first.optimizer) for each in optimizer.groups)
    if len(order) == len(sizes) or (is_alike and not stored):
        if others:
            return None, f"shapes differ at {list_names(others, 3)}"
        return names, "every shape fits" if stored else "no state has shapes that could tell"
    if not stored:
        return None, f"{len(sizes)} groups with different settings, and no state whose shapes tell them apart"
    groups = [[stored.get(number) for number in group.parameters] for group in optimizer.groups]
    places = _ways_to_divide([shapes.get(name, ()) for name in names], groups)
    if places is None and not others:
        return names, NOT_PROVEN
    if not places:
        return None, f"shapes fit its {len(sizes)} groups in several ways" if places is None else "shapes differ"
    grouped = [[name for name, place in zip(names, places, strict=True) if place == i] for i in range(len(sizes))]
    return [name for part in grouped for name in part], "shapes fit its groups in one way"


NOT_PROVEN = "groups are taken in a row, and shapes fit in other ways, too (`--names`)"
"""What a note ends in if the groups of an optimizer could be others."""

_MOST_WAYS = 256
"""Ways that are followed at once. Groups that need more are not told apart by shapes, such as those of equal layers."""


def _ways_to_divide(
    shapes: Sequence[tuple[int, ...]], groups: Sequence[Sequence[tuple[int, ...] | None]]
) -> list[int] | None:
    """Return the group of each shape, if groups keep their order and one way fits; none of them for no way.

    None stands for a shape that is not known, and in place of a result for several ways.
    """
    paths: dict[tuple[int, ...], list[int] | None] = {(0,) * len(groups): []}
    """How many are taken of each group -> how; None where there are several ways."""
    for shape in shapes:
        further: dict[tuple[int, ...], list[int] | None] = {}
        for taken, path in paths.items():
            for i, group in enumerate(groups):
                if taken[i] == len(group) or group[taken[i]] not in (None, shape):
                    continue
                after = (*taken[:i], taken[i] + 1, *taken[i + 1 :])
                further[after] = None if path is None or after in further else [*path, i]
        if len(further) > _MOST_WAYS:
            return None
        paths = further
    return next(iter(paths.values()), [])


def _rename_slots(optimizer: Optimizer, names: Mapping[Any, str]) -> Optimizer:
    groups = tuple(
        dataclasses.replace(group, parameters=tuple(names[number] for number in group.parameters))
        for group in optimizer.groups
    )
    return dataclasses.replace(
        optimizer, groups=groups, slots={names.get(number, number): kept for number, kept in optimizer.slots.items()}
    )


_ELEMENTWISE = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum",
    "exp_inf", "master",
)  # fmt: skip
"""Slots of the shape of their parameter."""
