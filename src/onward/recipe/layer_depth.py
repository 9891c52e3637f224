"""How deep parameters lie, and learning rates that fall with the depth.

A network is a row of blocks, from its input to its output. A block is what shares a name up to its first number
(`encoder.layer.3`); all that is read before the first of them is one more block, and so is all that is read after the
last. Where names have no numbers, each weight that is a matrix or more begins a block, and the vectors that follow
belong to it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import onnx_ir as ir

from onward.errors import RecipeError
from onward.recipe.layers import layers
from onward.recipe.optimizers.configuration import ConfiguredOptimizer
from onward.recipe.optimizers.graph_optimizer import FunctionOptimizer
from onward.recipe.optimizers.groups import Group

_FIRST, _LAST = "first", "last"


def divide_by_depth(groups: Sequence[Group], graph: ir.Graph, decay: float) -> list[Group]:
    """The groups divided by depth: the rate of a block is `decay` times that of the block after it."""
    whole = [group.optimizer.name for group in groups if isinstance(group.optimizer, FunctionOptimizer)]
    if whole:
        raise RecipeError(
            f"the optimizer `{whole[0]}` updates all its parameters at once, which cannot be divided by depth",
            hint="leave `lr_decay` out",
        )
    found = depths(graph, [value for group in groups for value in group.parameters])
    parts = [
        (group, depth, members)
        for group in groups
        for depth in sorted({found[value] for value in group.parameters})
        if (members := [value for value in group.parameters if found[value] == depth])
    ]
    return [
        Group(f"group{i}", _slower(group.optimizer, decay**depth), members)
        for i, (group, depth, members) in enumerate(parts)
    ]


def _slower(optimizer: ConfiguredOptimizer | FunctionOptimizer, factor: float) -> ConfiguredOptimizer:
    assert isinstance(optimizer, ConfiguredOptimizer)
    return dataclasses.replace(optimizer, values={**optimizer.values, "lr": optimizer.values["lr"] * factor})


def depths(graph: ir.Graph, parameters: Sequence[ir.Value]) -> dict[ir.Value, int]:
    """How many blocks follow the one that a parameter belongs to."""
    position = {node: i for i, node in enumerate(graph.all_nodes())}
    first = {
        value: min((position[node] for node in value.consumers() if node in position), default=len(position))
        for value in parameters
    }
    named = {layer.weight: layer.module for layer in layers(graph)}
    marks: dict[ir.Value, object] = {value: _block(named.get(value) or value.name or "") for value in parameters}
    is_numbered = any(mark is not None for mark in marks.values())
    if not is_numbered:
        marks = {value: first[value] if value.shape is not None and len(value.shape) > 1 else None for value in marks}
    in_order = sorted(parameters, key=lambda value: (first[value], marks[value] is None))
    last = max((i for i, value in enumerate(in_order) if marks[value] is not None), default=-1)
    current: object = _FIRST
    blocks: dict[object, list[ir.Value]] = {}
    for i, value in enumerate(in_order):
        if marks[value] is not None:
            current = marks[value]
        elif is_numbered and i > last:
            current = _LAST
        blocks.setdefault(current, []).append(value)
    return {value: depth for depth, block in enumerate(reversed(blocks.values())) for value in block}


def _block(name: str) -> str | None:
    """`encoder.layer.3` of `encoder.layer.3.query.weight`; also where the exporter wrote `layer1.layer1.0.conv`."""
    plain = re.sub(r"(^|\.)(\w+)\.\2\.(?=\d)", r"\1\2.", name)
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", plain)
    return found[0] if found else None
