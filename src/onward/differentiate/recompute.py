"""Activation checkpointing: recomputation of segments of the forward pass in the backward pass, to save memory.

A segment is copied behind the gradient that arrives at its end. The copy reads its inputs through a `Where` with the
same tensor in both branches and a condition from that gradient. So a runtime can neither run the copy earlier, when the
memory is not free yet, nor merge it with the original.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import onnx_ir as ir

from onward.build import Builder, Expr, copy_node
from onward.errors import UnknownNameError, UnsupportedError, suggest_or_list
from onward.model.walk import is_random, nested_graphs

Choice = int | str | Sequence[str] | None
"""Nodes to recompute: patterns of their names, or a number n to keep the result of every n-th layer."""


class Recomputation:
    """Copies of nodes for the reverse sweep to differentiate, made a segment at a time."""

    def __init__(self, segments: Iterable[Sequence[ir.Node]], sources: Collection[ir.Value], *, keep_ends: bool):
        """Take the segments. With `keep_ends`, nodes behind a segment read its original results."""
        self._sources = sources
        self._segments = {node: segment for segment in segments for node in segment}
        self._keep_ends = keep_ends
        self._copies: dict[ir.Node, ir.Node] = {}

    def seen(self, op: Builder, node: ir.Node, dys: Sequence[Expr | None]) -> tuple[ir.Node, Sequence[ir.Value | None]]:
        """Return the node, or copy, that a rule differentiates for gradients `dys`, and its inputs."""
        dy = next(dy for dy in dys if dy is not None)
        if node in self._segments:
            copy = self._copy_of(op, node, dy)
            return copy, copy.inputs
        if self._keep_ends:
            return node, node.inputs
        return node, [self._computed_again(op, value, dy) for value in node.inputs]

    def _computed_again(self, op: Builder, value: ir.Value | None, dy: Expr) -> ir.Value | None:
        producer = value.producer() if value is not None else None
        if value is None or producer not in self._segments:
            return value
        return self._copy_of(op, producer, dy).outputs[producer.outputs.index(value)]

    def _copy_of(self, op: Builder, node: ir.Node, dy: Expr) -> ir.Node:
        if node not in self._copies:
            self._copy(op, self._segments[node], dy)
        return self._copies[node]

    def _copy(self, op: Builder, segment: Sequence[ir.Node], dy: Expr) -> None:
        is_nan = op.IsNaN(op.ReduceSum(dy, keepdims=0))  # its value does not matter, only that it depends on dy
        new: dict[ir.Value, ir.Value] = {}

        def again(value: ir.Value | None) -> ir.Value | None:
            if value is None or value in self._sources or value.producer() is None or value.is_initializer():
                return value
            if value not in new:
                new[value] = op.Where(is_nan, value, value).like(value).value
            return new[value]

        for node in segment:
            copy = copy_node(node, map(again, node.inputs), op.names, "again/{}")
            new.update(zip(node.outputs, copy.outputs, strict=True))
            op.graph.append(copy)
            self._copies[node] = copy


def recomputation(choice: Choice, nodes: Sequence[ir.Node], xs: Collection[ir.Value]) -> Recomputation | None:
    """Return the segments to recompute of the nodes between `xs` and the result."""
    if choice is None:
        return None
    layers = isinstance(choice, int)
    segments = _layers(choice, nodes, xs) if isinstance(choice, int) else _matching_segments(choice, nodes)
    return Recomputation(
        ([node for node in segment if _is_repeatable(node)] for segment in segments), xs, keep_ends=layers
    )


def _is_repeatable(node: ir.Node) -> bool:
    """True if a second computation gives the same tensors: no random numbers, and no nested graphs.

    Rules of operators with nested graphs recompute these themselves.
    """
    plain = all(output.type is None or isinstance(output.type, ir.TensorType) for output in node.outputs)
    return plain and not is_random(node) and next(nested_graphs(node), None) is None


# ---- patterns --------------------------------------------------------------------------------------------------------


def _matching_segments(choice: str | Sequence[str], nodes: Sequence[ir.Node]) -> Iterator[list[ir.Node]]:
    """Yield the nodes whose name or output matches; connected nodes form a segment."""
    patterns = [choice] if isinstance(choice, str) else list(choice)
    names = {node: [node.name or "", *(output.name or "" for output in node.outputs)] for node in nodes}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for node_names in names.values() for name in node_names):
            known_names = [name for node_names in names.values() for name in node_names if name]
            raise UnknownNameError(
                f"nothing to compute again matches `{pattern}`", hint=suggest_or_list(pattern.strip("*"), known_names)
            )
    segment_of: dict[ir.Node, list[ir.Node]] = {}
    for node in nodes:
        if not any(fnmatchcase(name, pattern) for pattern in patterns for name in names[node]):
            continue
        segment = segment_of[node] = [node]
        for producer in (value.producer() for value in node.inputs if value is not None):
            before = segment_of.get(producer) if producer is not None else None
            if before is not None and before is not segment:
                for other in segment:
                    segment_of[other] = before
                before += segment
                segment = before
    unique = {id(segment): segment for segment in segment_of.values()}
    order = {node: i for i, node in enumerate(nodes)}
    return (sorted(segment, key=order.__getitem__) for segment in unique.values())


# ---- layers ----------------------------------------------------------------------------------------------------------


def _layers(every: int, nodes: Sequence[ir.Node], xs: Collection[ir.Value]) -> list[list[ir.Node]]:
    """Return segments of `every` layers. Nodes after the last full segment stay: they are needed at once."""
    if every < 1:
        raise UnsupportedError(f"the results of every {every}th layer cannot be kept", hint="give a number above 0")
    layers = _split_layers(nodes, set(xs))
    if len(layers) <= every:
        raise UnsupportedError(
            f"there are {len(layers)} layers, stretches between values through which everything flows: too few to keep "
            f"the result of every {every}th",
            hint="give a smaller number, or patterns of names of nodes",
        )
    whole = len(layers) - 1 - (len(layers) - 1) % every
    return [[*itertools.chain(*layers[i : i + every])] for i in range(0, whole, every)]


def _split_layers(nodes: Sequence[ir.Node], xs: set[ir.Value]) -> list[list[ir.Node]]:
    """Split the nodes where a single value leads on; each layer reads parameters of its own."""
    last_use = {value: i for i, node in enumerate(nodes) for value in node.inputs if value is not None}
    layers: list[list[ir.Node]] = [[]]
    live: dict[ir.Value, int] = {}
    has_parameters = False
    for i, node in enumerate(nodes):
        layers[-1].append(node)
        has_parameters = has_parameters or any(value in xs for value in node.inputs)
        live.update({output: last_use[output] for output in node.outputs if last_use.get(output, -1) > i})
        for value in [value for value in node.inputs if value is not None and live.get(value) == i]:
            del live[value]
        if len(live) == 1 and has_parameters:
            layers.append([])
            has_parameters = False
    return [layer for layer in layers if layer]
