"""Updates that are alike, compiled once: those of weights of one shape are the same function of other tensors.

A model of many layers has hundreds of weights, and the compiler would look at each of them, and at each pair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import fx

_FEWEST_OF_A_KIND = 3
"""Updates of one kind that are worth a function of their own."""
FEWEST = 100
"""Updates that are worth it in all: fewer are compiled as quickly within the step, and loaded sooner."""
_MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


@dataclasses.dataclass(frozen=True)
class Alike:
    """A function that writes new state over the old, and what it is called with."""

    graph: fx.GraphModule
    calls: list[list[int]]
    """For each call the places of its tensors: among the inputs of the step, its constants, what it hands over."""


@dataclasses.dataclass(frozen=True)
class Updates:
    """What was taken out of a step. It runs after it."""

    alike: list[Alike]
    constants: list[torch.Tensor]
    handed_over: int
    """How many tensors the step returns for it, after all else."""


def split_off_updates(graph: fx.GraphModule) -> Updates:
    """Take updates that are alike out of a step."""
    kinds: dict[Hashable, list[_Update]] = {}
    for update in _find_updates(graph):
        kinds.setdefault(update.kind(), []).append(update)
    chosen = [updates for updates in kinds.values() if len(updates) >= _FEWEST_OF_A_KIND]
    if sum(map(len, chosen)) < FEWEST:
        return Updates([], [], 0)
    read = dict.fromkeys(node for updates in chosen for update in updates for node in update.reads)
    given = [node for node in graph.graph.nodes if node.op == "placeholder"]
    constants = [node for node in read if node.op == "get_attr"]
    made = [node for node in read if node.op == "call_function"]
    places = {node: i for i, node in enumerate((*given, *constants, *made))}
    found = [Alike(updates[0].function(), [[places[node] for node in u.reads] for u in updates]) for updates in chosen]
    values = [_value(node) for node in constants]
    *_, last = graph.graph.nodes
    last.args = ([*last.args[0], *made],)
    for node in [node for updates in chosen for update in updates for node in reversed(update.nodes)]:
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return Updates(found, values, len(made))


class _Update:
    """The nodes that compute some state of itself, of numbers, and of a gradient, element by element."""

    def __init__(self, nodes: Iterable[fx.Node], order: dict[fx.Node, int]):
        self.nodes = sorted(nodes, key=order.__getitem__)
        inner = set(self.nodes)
        self.reads = list(dict.fromkeys(x for node in self.nodes for x in node.all_input_nodes if x not in inner))
        self.written = {node.args[0] for node in self.nodes if _is_write(node)}

    def kind(self) -> Hashable:
        """What it computes, whatever the tensors are called."""
        numbers = {node: i for i, node in enumerate((*self.reads, *self.nodes))}

        def named(value: Any) -> Any:
            return fx.node.map_arg(value, lambda node: f"%{numbers[node]}")

        calls = [f"{node.target} {named(node.args)} {named(node.kwargs)}" for node in self.nodes]
        return (*map(_described, self.reads), *calls)

    def function(self) -> fx.GraphModule:
        made = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for i, node in enumerate(self.reads):
            copies[node] = made.placeholder(f"x_{i}")
            copies[node].meta = {"val": _value(node)}
        for node in self.nodes:
            copies[node] = made.node_copy(node, copies.__getitem__)
        made.output([])
        return fx.GraphModule({}, made)


def _find_updates(graph: fx.GraphModule) -> list[_Update]:
    """Those that can run after all else: nobody else reads what they compute, or writes what they read."""
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    writes = [node for node in order if _is_write(node)]
    cones: list[set[fx.Node]] = []
    for write in writes:
        cone = _cone(write)
        joined = [other for other in cones if not cone.isdisjoint(other)]
        cones = [other for other in cones if other not in joined] + [cone.union(*joined)]
    updates = [_Update(_closed(cone), order) for cone in cones]
    written = {node.args[0] for node in writes}
    return [update for update in updates if update.written and _is_apart(update, written)]


def _cone(write: fx.Node) -> set[fx.Node]:
    """What is computed element by element on the way to a write, and has its shape."""
    shape = write.args[0].meta["val"].shape
    found = {write}
    pending = [write.args[1]]
    while pending:
        node = pending.pop()
        if node not in found and _is_elementwise(node) and node.meta["val"].shape == shape:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _closed(cone: set[fx.Node]) -> set[fx.Node]:
    """Without what others read, too: that is computed before, and handed over."""
    inner = set(cone)
    while outside := {node for node in inner if not _is_write(node) and not inner.issuperset(node.users)}:
        inner -= outside
    return {node for node in inner if not _is_write(node) or node.args[1] in inner}


def _is_apart(update: _Update, written: set[fx.Node]) -> bool:
    """Whether it reads no state that others write, and no part of such: what it writes itself it reads before."""
    return all(_base(node) not in written or node in update.written for node in update.reads)


def _base(node: fx.Node) -> fx.Node:
    """What a node is a view of."""
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


def _described(node: fx.Node) -> Hashable:
    value = _value(node)
    return value.dtype, tuple(value.shape), value.stride(), value.device
