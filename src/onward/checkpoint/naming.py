"""Names of what an optimizer keeps, where a checkpoint has only numbers.

PyTorch numbers parameters in the order in which an optimizer was given them: nearly always that of the module, which
its state and its graph have, too. An order is taken if it fits in every number and shape, and never shapes without an
order.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from onward.checkpoint.description import Checkpoint, Optimizer
from onward.checkpoint.tensors import Tensor
from onward.errors import UnsupportedError, list_names

_WITHOUT_DECAY = [
    re.compile(pattern)
    for pattern in ("bias", "layernorm", "layer_norm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
]
"""Names of parameters that the Trainer of transformers puts into its second group."""

Shapes = Mapping[str, tuple[int, ...]]
Order = Sequence[Sequence[str]]
"""Parameters in the order in which an optimizer was given them: in one part, or group by group."""


def with_names(optimizer: Optimizer, orders: Mapping[str, Order], shapes: Shapes) -> tuple[Optimizer, str]:
    """An optimizer with names for its parameters, and how they were found.

    `orders` are the orders in which parameters might have been given to it, by what they come from.
    """
    if optimizer.has_names:
        return optimizer, ""
    groups = [list(group.parameters) for group in optimizer.groups]
    count = sum(map(len, groups))
    for origin, order in orders.items():
        for way, named in _possible_orders(order, groups):
            made = _rename_slots(optimizer, dict(zip([n for group in groups for n in group], named, strict=True)))
            if not _unfitting(made, shapes):
                return made, f"parameters of the optimizer are named by {origin}{way}; every shape fits"
    raise UnsupportedError(
        f"the optimizer keeps {count} parameters by number, and their names are not stored",
        hint="give them in its order: `--names FILE` with a name in each line, or `names=[...]`; "
        + "; ".join(f"{origin}: {_why(order, optimizer, groups, shapes)}" for origin, order in orders.items()),
    )


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
    named = tuple(with_names(optimizer, orders, shapes)[0] for optimizer in checkpoint.optimizers)
    return dataclasses.replace(checkpoint, optimizers=named)


def _possible_orders(parts: Order, groups: list[list[Any]]) -> list[tuple[str, list[str]]]:
    """An order as it is, and as the Trainer of transformers divides it; where the numbers of parameters agree."""
    sizes = [len(group) for group in groups]
    order = [name for part in parts for name in part]
    if len(parts) > 1:
        return [("", order)] if sizes == [len(part) for part in parts] else []
    if len(order) != sum(sizes):
        return []
    plain = [without for without in order if any(p.search(without.lower()) for p in _WITHOUT_DECAY)]
    decayed = [name for name in order if name not in set(plain)]
    if sizes == [len(decayed), len(plain)] and plain:
        return [(", those without weight decay behind the others", [*decayed, *plain])]
    return [("", list(order))]


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


def _unfitting(optimizer: Optimizer, shapes: Shapes) -> list[str]:
    """Parameters whose slots are of another shape."""
    return [
        str(name)
        for name, slots in optimizer.slots.items()
        for slot, kept in slots.items()
        if slot in _ELEMENTWISE and isinstance(kept, Tensor) and kept.shape != shapes.get(str(name))
    ]


def _why(order: Order, optimizer: Optimizer, groups: list[list[Any]], shapes: Shapes) -> str:
    for _, named in _possible_orders(order, groups):
        made = _rename_slots(optimizer, dict(zip([n for group in groups for n in group], named, strict=True)))
        return f"shapes differ at {list_names(_unfitting(made, shapes), 3)}"
    return f"{' and '.join(str(len(part)) for part in order)} parameters"
