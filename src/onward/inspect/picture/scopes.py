"""Cutting a long graph into parts that people know by name: layers and blocks, as the names of nodes tell them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import onnx_ir as ir

from onward.inspect.values import reads

SHORT = 150
"""A graph of so many nodes is drawn node by node."""
_FEWEST, _MOST = 8, 80
_NAMESPACE = "namespace"
_COPY = "train/"

Part = tuple[str, list[ir.Node]]


def cut(nodes: Sequence[ir.Node]) -> list[Part]:
    """The nodes in order, in parts that have a name; one node each, without a name, where there are not many.

    A part is a run of neighbours, so that parts depend on one another only in one direction, as nodes do.
    """
    if len(nodes) <= SHORT:
        return [("", [node]) for node in nodes]
    scopes = [_scope(node) for node in nodes]
    finest: list[Part] = []
    for depth in range(max(map(len, scopes)), 0, -1):
        parts = _runs(nodes, [scope[:depth] for scope in scopes])
        if _FEWEST <= len(parts) <= _MOST:
            return parts
        finest = parts if len(parts) > _MOST else finest
    return _joined(finest) if finest else _at_bottlenecks(nodes)


def _scope(node: ir.Node) -> tuple[str, ...]:
    """The path of a node in the module that it comes from, by its name, its metadata, or the names of its weights."""
    name = (node.name or "").removeprefix(_COPY)
    path = [part for part in name.split("/") if part][:-1]
    if not path and (namespace := node.metadata_props.get(_NAMESPACE)):
        path = [part.partition(":")[0] for part in namespace.split("/")][:-1]
    if not path:
        weights = [value.name or "" for value in node.inputs if value is not None and value.is_initializer()]
        path = next((name.split(".")[:-1] for name in weights if "." in name), [])
    return tuple(path)


def _runs(nodes: Sequence[ir.Node], scopes: Sequence[tuple[str, ...]]) -> list[Part]:
    """Neighbours with the same scope; a node without one goes with the node before it."""
    parts: list[Part] = []
    for node, scope in zip(nodes, scopes, strict=True):
        name = "/".join(scope)
        if not parts or (name and name != parts[-1][0]):
            parts.append((name, []))
        parts[-1][1].append(node)
    return parts


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Several parts in one, so that there are not too many."""
    step = math.ceil(len(parts) / _MOST)
    found = []
    for start in range(0, len(parts), step):
        names = list(dict.fromkeys(name for name, _ in parts[start : start + step]))
        found.append((_span(names[0], names[-1]), [node for _, nodes in parts[start : start + step] for node in nodes]))
    return found


def _span(first: str, last: str) -> str:
    """`encoder/layer.0 to layer.1`."""
    (parent, _, _), (other, _, end) = first.rpartition("/"), last.rpartition("/")
    return first if first == last else f"{first} to {end if parent == other else last}"


def _at_bottlenecks(nodes: Sequence[ir.Node]) -> list[Part]:
    """Parts of similar length, which end where few values go on to the next."""
    crossing = _crossings(nodes)
    length = math.ceil(len(nodes) / _MOST * 2)
    cuts = [0]
    while len(nodes) - cuts[-1] > length + length // 2:
        window = range(cuts[-1] + length // 2, cuts[-1] + length + length // 2)
        cuts.append(min(window, key=lambda i: (crossing[i], abs(i - cuts[-1] - length))) + 1)
    return [("", list(nodes[start:end])) for start, end in pairwise([*cuts, len(nodes)])]


def _crossings(nodes: Sequence[ir.Node]) -> list[int]:
    """How many values are computed at or before each node and read after it."""
    position = {value: i for i, node in enumerate(nodes) for value in node.outputs}
    last = {value: i for i, node in enumerate(nodes) for value in reads(node) if value in position}
    changes = [0] * (len(nodes) + 1)
    for value, end in last.items():
        changes[position[value]] += 1
        changes[end] -= 1
    counts, total = [], 0
    for change in changes[:-1]:
        total += change
        counts.append(total)
    return counts
