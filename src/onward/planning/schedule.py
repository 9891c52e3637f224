"""The order in which a lowered step is computed, and what is in memory meanwhile.

The forward pass is all that the loss depends on; the rest is the way back, as the rules have written it. What the way
back reads of the forward pass is kept until then: no rule of thumb, but what the graph says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onward.lowering.contract import Contract
from onward.model.walk import ancestors, read_by

Bytes = Callable[[ir.Value], int]


@dataclasses.dataclass(frozen=True)
class LoweredBlock:
    """A part of the forward pass that is repeated: one layer of a transformer."""

    name: str
    nodes: Sequence[ir.Node]
    weights: Collection[str]
    """The names of what it alone reads of the state."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Nodes of the forward pass that an engine computes as one, with a way back of its own."""

    inside: Collection[ir.Value]
    """What it does not leave in memory."""
    kept: Collection[ir.Value]
    """What it needs for the way back, whatever our rules need."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """Bytes in memory, node by node, beside the state and the batch."""

    kept: int
    """What the way back reads of the forward pass."""
    activations: np.ndarray
    gradients: np.ndarray
    """Those of parameters that are there already."""

    def peak(self, *, gradients_from_the_start: bool, share: float = 1.0) -> int:
        """The most that there is beyond a `share` of all gradients, which the device holds in the end."""
        if gradients_from_the_start:
            return int(self.activations.max())
        held = self.gradients[-1] * share
        return int(max(0, (self.activations + self.gradients * share).max() - held))


class MemorySchedule:
    """The nodes of the lowered part `gradients`, in the order of a framework."""

    def __init__(
        self,
        graph: ir.Graph,
        contract: Contract,
        kernels: Sequence[Kernel] = (),
        is_inside: Callable[[ir.Value], bool] = lambda value: False,
        holds_twice: Callable[[ir.Node], bool] = lambda node: False,
    ):
        """`is_inside` says what else is not left in memory, of what nodes make on the way back, and `holds_twice` which
        of those nodes need as much again as their result while they run."""
        gradients = [value for value in graph.outputs if value.name in contract.gradients]
        self.forward, self.backward = _in_order(graph, gradients)
        self._owner = _owners(self.nodes)
        self.gradients = {self._owner.get(value, value) for value in gradients}
        self._inside = {v for node in self.backward for v in node.outputs if is_inside(v) and v not in self.gradients}
        self._inside.update(value for kernel in kernels for value in kernel.inside)
        self._twice = [node for node in self.backward if holds_twice(node)]
        at = {node: i for i, node in enumerate(self.nodes)}
        self._born = {value: at[node] for node in self.nodes for value in node.outputs}
        self._reads: dict[ir.Value, list[int]] = {}
        for node, end in self._ends(at).items():
            for value in set(read_by(node)) if node.op_type not in _OF_SHAPES else ():
                self._reads.setdefault(self._owner.get(value, value), []).append(end)
        for kernel in kernels:
            read = [i for v in kernel.inside for i in self._reads.get(self._owner.get(v, v), [])]
            late = [i for i in read if i >= len(self.forward)]
            for value in {self._owner.get(v, v) for v in kernel.kept}:
                self._reads.setdefault(value, []).extend(late)
        for reads in self._reads.values():
            reads.sort()

    def _ends(self, at: Mapping[ir.Node, int]) -> dict[ir.Node, int]:
        """When the kernel of each node is done: on the way back, what is inside of one is computed with what it reads
        still there."""
        ends = {node: at[node] for node in self.forward}
        for node in reversed(self.backward):
            readers = [ends[reader] for value in node.outputs for reader in value.consumers() if reader in ends]
            is_inside = all(value in self._inside for value in node.outputs)
            ends[node] = max(readers, default=at[node]) if is_inside else at[node]
        return ends

    @property
    def nodes(self) -> list[ir.Node]:
        return [*self.forward, *self.backward]

    def kept(self) -> list[ir.Value]:
        """Tensors of the forward pass that the way back reads, each once, however it is seen."""
        end = len(self.forward)
        return [v for v in self.tensors() if self._born[v] < end and self._reads.get(v, [0])[-1] >= end]

    def usage(self, bytes_of: Bytes, again: Iterable[LoweredBlock] = ()) -> Usage:
        """With parts that are computed again: what they make is dropped, and is back when the way back comes there."""
        end, count = len(self.forward), len(self.nodes)
        changes = np.zeros((2, count + 1), np.int64)
        kept, returns = {value: bytes_of(value) for value in self.kept()}, self._returns(again)
        for value in self.tensors():
            size, born, reads = bytes_of(value), self._born[value], self._reads.get(value, [])
            if value in self.gradients:
                changes[1, born] += size
                continue
            lives = [(born, max(reads, default=born))]
            if value in kept and value in returns:
                early = [at for at in reads if at < end]
                lives = [(born, max(early, default=born)), (returns[value], reads[-1])]
                kept.pop(value)
            for start, stop in lives:
                changes[0, start] += size
                changes[0, stop + 1] -= size
        for value in (node.outputs[0] for node in self._twice):
            changes[0, self._born[value]] += bytes_of(value)
            changes[0, self._born[value] + 1] -= bytes_of(value)
        activations, gradients = np.cumsum(changes[:, :count], axis=1)
        return Usage(sum(kept.values()), activations, gradients)

    def tensors(self) -> Iterable[ir.Value]:
        """What takes memory of its own, of all that nodes make."""
        return (v for v in self._born if self._owner.get(v, v) is v and v not in self._inside)

    def _returns(self, again: Iterable[LoweredBlock]) -> dict[ir.Value, int]:
        """For what is computed again: when that is, which is before the first node that reads some of its part."""
        end, found = len(self.forward), {}
        for block in again:
            inside = set(block.nodes)
            made = {self._owner.get(v, v) for node in inside for v in node.outputs}
            own = [
                v
                for v in made
                if v in self._born and all(self.nodes[at] in inside for at in self._reads.get(v, []) if at < end)
            ]
            late = [at for v in own for at in self._reads.get(v, []) if at >= end]
            found.update(dict.fromkeys(own, min(late, default=end)))
        return found


def _in_order(graph: ir.Graph, gradients: Collection[ir.Value]) -> tuple[list[ir.Node], list[ir.Node]]:
    """The forward pass, then the way back, in which a gradient is computed as soon as it can be."""
    ahead, _ = ancestors(value for value in graph.outputs if value not in gradients)
    forward = [node for node in graph if node in ahead]
    backward: list[ir.Node] = []
    waiting: dict[ir.Value, list[ir.Node]] = {}
    missing: dict[ir.Node, int] = {}
    for node in (value.producer() for value in gradients):
        if node is None or node in ahead or any(value.uses() for value in node.outputs):
            continue
        if needs := {v for v in read_by(node) if (maker := v.producer()) is not None and maker not in ahead}:
            missing[node] = len(needs)
        for value in needs:
            waiting.setdefault(value, []).append(node)
    for node in (node for node in graph if node not in ahead and node not in missing):
        backward.append(node)
        for reader in (reader for value in node.outputs for reader in waiting.get(value, ())):
            missing[reader] -= 1
            if not missing[reader]:
                backward.append(reader)
    return forward, backward


_OF_SHAPES = {"Shape", "Size"}
"""What these read need not be in memory."""
_KEEPS_ORDER = {"Identity", "Squeeze", "Unsqueeze", "Flatten", "Reshape"}
_OTHER_ORDER = {"Transpose", "Slice", "Split", "Expand"}
"""Operators that look at a tensor in another way; what follows reads it in another order than it lies there."""


def _owners(nodes: Iterable[ir.Node]) -> Mapping[ir.Value, ir.Value]:
    """For what is only a view: the tensor that it is a view of."""
    owner: dict[ir.Value, ir.Value] = {}
    scattered: set[ir.Value] = set()
    for node in nodes:
        source = node.inputs[0] if node.inputs else None
        if source is None or node.op_type not in _KEEPS_ORDER | _OTHER_ORDER:
            continue
        if source in scattered and node.op_type in ("Reshape", "Flatten"):
            continue  # which has to copy it
        owner.update(dict.fromkeys(node.outputs, owner.get(source, source)))
        if source in scattered or node.op_type in _OTHER_ORDER:
            scattered.update(node.outputs)
    return owner
