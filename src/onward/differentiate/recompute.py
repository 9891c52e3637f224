"""Activation checkpointing: computing parts of the forward pass a second time, for the way back, to save memory.

A part is copied behind the gradient that arrives at its end. What it reads comes to the copy through a `Where` that has
the same tensor in both branches and waits for that gradient: a runtime can neither run the copy earlier, when the
memory is not free yet, nor find that it is equal to the original and drop it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import onnx_ir as ir

from onward.build import Builder, Expr, twin
from onward.errors import UnknownNameError, UnsupportedError, near_or_first
from onward.model.walk import is_random, nested_graphs

Choice = int | str | Sequence[str] | None
"""Nodes to compute again: those whose names match patterns, or all, keeping the result of every n-th layer."""


class Recomputation:
    """Gives the sweep copies of nodes to differentiate, a part at a time, when it comes to the end of the part."""

    def __init__(self, parts: Iterable[Sequence[ir.Node]], given: Collection[ir.Value], *, keep_ends: bool):
        """Of a part whose ends are kept, the nodes behind it read what was computed at first."""
        self._given = given
        self._part = {node: part for part in parts for node in part}
        self._keep_ends = keep_ends
        self._copies: dict[ir.Node, ir.Node] = {}

    def seen(self, op: Builder, node: ir.Node, dys: Sequence[Expr | None]) -> tuple[ir.Node, Sequence[ir.Value | None]]:
        """What a rule is to look at in the place of a node that the gradients `dys` have reached, and its inputs."""
        dy = next(dy for dy in dys if dy is not None)
        if node in self._part:
            copy = self._copy_of(op, node, dy)
            return copy, copy.inputs
        if self._keep_ends:
            return node, node.inputs
        return node, [self._computed_again(op, value, dy) for value in node.inputs]

    def _computed_again(self, op: Builder, value: ir.Value | None, dy: Expr) -> ir.Value | None:
        producer = value.producer() if value is not None else None
        if value is None or producer not in self._part:
            return value
        return self._copy_of(op, producer, dy).outputs[producer.outputs.index(value)]

    def _copy_of(self, op: Builder, node: ir.Node, dy: Expr) -> ir.Node:
        if node not in self._copies:
            self._copy(op, self._part[node], dy)
        return self._copies[node]

    def _copy(self, op: Builder, part: Sequence[ir.Node], dy: Expr) -> None:
        arrived = op.IsNaN(op.ReduceSum(dy, keepdims=0))  # whatever it is, it is known only then
        new: dict[ir.Value, ir.Value] = {}

        def again(value: ir.Value | None) -> ir.Value | None:
            if value is None or value in self._given or value.producer() is None or value.is_initializer():
                return value
            if value not in new:
                new[value] = op.Where(arrived, value, value).like(value).value
            return new[value]

        for node in part:
            copy = twin(node, map(again, node.inputs), op.names, "again/{}")
            new.update(zip(node.outputs, copy.outputs, strict=True))
            op.graph.append(copy)
            self._copies[node] = copy


def recomputation(choice: Choice, nodes: Sequence[ir.Node], xs: Collection[ir.Value]) -> Recomputation | None:
    """What of the nodes between `xs` and the result is to be computed twice."""
    if choice is None:
        return None
    layers = isinstance(choice, int)
    parts = _layers(choice, nodes, xs) if isinstance(choice, int) else _matching(choice, nodes)
    return Recomputation(([node for node in part if _is_repeatable(node)] for part in parts), xs, keep_ends=layers)


def _is_repeatable(node: ir.Node) -> bool:
    """Not what draws other numbers the second time; and what holds graphs is computed again by its own rule."""
    plain = all(output.type is None or isinstance(output.type, ir.TensorType) for output in node.outputs)
    return plain and not is_random(node) and next(nested_graphs(node), None) is None


# ---- patterns --------------------------------------------------------------------------------------------------------


def _matching(choice: str | Sequence[str], nodes: Sequence[ir.Node]) -> Iterator[list[ir.Node]]:
    """The nodes that match, by their name or that of a result, those that hang together in one part."""
    patterns = [choice] if isinstance(choice, str) else list(choice)
    names = {node: [node.name or "", *(output.name or "" for output in node.outputs)] for node in nodes}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for of_node in names.values() for name in of_node):
            known = [name for of_node in names.values() for name in of_node if name]
            raise UnknownNameError(
                f"nothing to compute again matches `{pattern}`", hint=near_or_first(pattern.strip("*"), known)
            )
    part_of: dict[ir.Node, list[ir.Node]] = {}
    for node in nodes:
        if not any(fnmatchcase(name, pattern) for pattern in patterns for name in names[node]):
            continue
        part = part_of[node] = [node]
        for producer in (value.producer() for value in node.inputs if value is not None):
            before = part_of.get(producer) if producer is not None else None
            if before is not None and before is not part:
                for other in part:
                    part_of[other] = before
                before += part
                part = before
    unique = {id(part): part for part in part_of.values()}
    order = {node: i for i, node in enumerate(nodes)}
    return (sorted(part, key=order.__getitem__) for part in unique.values())


# ---- layers ----------------------------------------------------------------------------------------------------------


def _layers(every: int, nodes: Sequence[ir.Node], xs: Collection[ir.Value]) -> list[list[ir.Node]]:
    """Parts of `every` layers each. What follows the last full part stays: its values are needed at once."""
    if every < 1:
        raise UnsupportedError(f"the results of every {every}th layer cannot be kept", hint="give a number above 0")
    layers = _between_narrows(nodes, set(xs))
    if len(layers) <= every:
        raise UnsupportedError(
            f"there are {len(layers)} layers, stretches between values through which everything flows: too few to keep "
            f"the result of every {every}th",
            hint="give a smaller number, or patterns of names of nodes",
        )
    whole = len(layers) - 1 - (len(layers) - 1) % every
    return [[*itertools.chain(*layers[i : i + every])] for i in range(0, whole, every)]


def _between_narrows(nodes: Sequence[ir.Node], xs: set[ir.Value]) -> list[list[ir.Node]]:
    """Cut where a single value leads on; each piece reads parameters of its own."""
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
