"""Compile equal updates once: weights of one shape have the same update with other tensors.

A model of many layers has hundreds of weights, and compile time grows with each weight and each
pair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import fx

_FEWEST_IN_GROUP = 3
"""Equal updates that justify a separate function."""
FEWEST = 100
"""Fewest updates in groups for a split. Fewer compile as fast within the step."""
_MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


@dataclasses.dataclass(frozen=True)
class UpdateGroup:
    """A function that overwrites state, and its calls."""

    graph: fx.GraphModule
    calls: list[list[int]]
    """Indices of tensors per call in (step inputs, constants, extra step outputs)."""


@dataclasses.dataclass(frozen=True)
class RepeatedUpdates:
    """Updates that were split off from a step and run after it."""

    groups: list[UpdateGroup]
    constants: list[torch.Tensor]
    extra_outputs: int
    """Number of tensors that the step returns for the updates, after its other outputs."""


def split_off_updates(graph: fx.GraphModule) -> RepeatedUpdates:
    """Remove repeated updates from a step, and return them."""
    by_signature: dict[Hashable, list[_Update]] = {}
    for update in _find_updates(graph):
        by_signature.setdefault(update.signature(), []).append(update)
    repeated = [updates for updates in by_signature.values() if len(updates) >= _FEWEST_IN_GROUP]
    if sum(map(len, repeated)) < FEWEST:
        return RepeatedUpdates([], [], 0)
    read = dict.fromkeys(node for updates in repeated for update in updates for node in update.reads)
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    constants = [node for node in read if node.op == "get_attr"]
    extra = [node for node in read if node.op == "call_function"]
    index = {node: i for i, node in enumerate((*inputs, *constants, *extra))}
    groups = [
        UpdateGroup(first.function(), [[index[x] for x in u.reads] for u in (first, *xs)]) for first, *xs in repeated
    ]
    values = [_value(node) for node in constants]
    *_, last = graph.graph.nodes
    last.args = ([*last.args[0], *extra],)
    for node in [node for updates in repeated for update in updates for node in reversed(update.nodes)]:
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return RepeatedUpdates(groups, values, len(extra))


class _Update:
    """The elementwise nodes that compute new state from old state, scalars and a gradient."""

    def __init__(self, nodes: Iterable[fx.Node], order: dict[fx.Node, int]):
        self.nodes = sorted(nodes, key=order.__getitem__)
        inner = set(self.nodes)
        self.reads = list(dict.fromkeys(x for node in self.nodes for x in node.all_input_nodes if x not in inner))
        self.written = {node.args[0] for node in self.nodes if _is_write(node)}

    def signature(self) -> Hashable:
        """Return the computation without the names of its tensors."""
        numbers = {node: i for i, node in enumerate((*self.reads, *self.nodes))}

        def numbered(value: Any) -> Any:
            return fx.node.map_arg(value, lambda node: f"%{numbers[node]}")

        types = [(x.dtype, tuple(x.shape), x.stride(), x.device) for x in map(_value, self.reads)]
        return (*types, *(f"{node.target} {numbered(node.args)} {numbered(node.kwargs)}" for node in self.nodes))

    def function(self) -> fx.GraphModule:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for i, node in enumerate(self.reads):
            copies[node] = graph.placeholder(f"x_{i}")
            copies[node].meta = {"val": _value(node)}
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output([])
        return fx.GraphModule({}, graph)


def _find_updates(graph: fx.GraphModule) -> list[_Update]:
    """Return updates that can run last: nothing else reads their results or writes their inputs."""
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    writes = [node for node in order if _is_write(node)]
    cones: list[set[fx.Node]] = []
    for write in writes:
        cone = _cone(write)
        joined = [other for other in cones if not cone.isdisjoint(other)]
        cones = [other for other in cones if other not in joined] + [cone.union(*joined)]
    updates = [_Update(_closed(cone), order) for cone in cones]
    written = {node.args[0] for node in writes}

    def is_separate(update: _Update) -> bool:
        # It may read state that it writes itself, before the write, but no state that others write,
        # nor a view of it.
        return all(_base(node) not in written or node in update.written for node in update.reads)

    return [update for update in updates if update.written and is_separate(update)]


def _cone(write: fx.Node) -> set[fx.Node]:
    """Return the elementwise ancestors of a write that have its shape, and the write."""
    shape = write.args[0].meta["val"].shape
    cone = {write}
    pending = [write.args[1]]
    while pending:
        node = pending.pop()
        if node not in cone and _is_elementwise(node) and node.meta["val"].shape == shape:
            cone.add(node)
            pending += node.all_input_nodes
    return cone


def _closed(cone: set[fx.Node]) -> set[fx.Node]:
    """Return a cone without the nodes that have other readers. The step computes those."""
    inner = set(cone)
    while outside := {node for node in inner if not _is_write(node) and not inner.issuperset(node.users)}:
        inner -= outside
    return {node for node in inner if not _is_write(node) or node.args[1] in inner}


def _base(node: fx.Node) -> fx.Node:
    """Return the node that a node is a view of."""
    while is_view(node):
        node = node.args[0]
    return node


def is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _is_write(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.copy_.default


def _is_elementwise(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (torch.Tag.pointwise in target.tags or target in _MOVES)


def _value(node: fx.Node) -> torch.Tensor:
    if node.op == "get_attr":
        return getattr(node.graph.owning_module, str(node.target))
    return node.meta["val"]
