"""The order in which a lowered step is computed, and what is in memory meanwhile.

The forward pass is all that the loss depends on; the rest is the backward pass, as the rules have written it. What the
backward pass reads of the forward pass is saved until then. The graph says what that is; nothing is guessed.
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
    """A block in the forward pass, such as one layer of a transformer."""

    name: str
    nodes: Sequence[ir.Node]
    weights: Collection[str]
    """Names of state that only this block reads."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Nodes of the forward pass that an engine computes as one operator, with its own backward pass."""

    inside: Collection[ir.Value]
    """Intermediate values, which never lie in memory."""
    saved: Collection[ir.Value]
    """Values that its backward pass needs, whatever Onward's rules need."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """Bytes in memory after each node, without the state and the batch."""

    saved: int
    """Values of the forward pass that the backward pass reads."""
    activations: np.ndarray
    gradients: np.ndarray
    """Gradients of parameters that are computed so far."""

    def peak(self, *, gradients_from_the_start: bool, share: float = 1.0) -> int:
        """Return the peak beyond a `share` of all gradients, which the device holds in the end."""
        if gradients_from_the_start:
            return int(self.activations.max())
        in_the_end = self.gradients[-1] * share
        return int(max(0, (self.activations + self.gradients * share).max() - in_the_end))


class MemorySchedule:
    """The nodes of the lowered part `gradients`, in the order in which a framework computes them."""

    def __init__(
        self,
        graph: ir.Graph,
        contract: Contract,
        kernels: Sequence[Kernel] = (),
        is_inside: Callable[[ir.Value], bool] = lambda value: False,
        holds_twice: Callable[[ir.Node], bool] = lambda node: False,
    ):
        """Order the nodes of a step, and find what reads each tensor last.

        - `is_inside`: True if an output of the backward pass never lies in memory
        - `holds_twice`: True if a node of the backward pass needs twice the memory of its result while it runs
        """
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
            for value in {self._owner.get(v, v) for v in kernel.saved}:
                self._reads.setdefault(value, []).extend(late)
        for reads in self._reads.values():
            reads.sort()

    def _ends(self, at: Mapping[ir.Node, int]) -> dict[ir.Node, int]:
        """Return when the kernel of each node ends: until then, all that its nodes read stays in memory."""
        ends = {node: at[node] for node in self.forward}
        for node in reversed(self.backward):
            readers = [ends[reader] for value in node.outputs for reader in value.consumers() if reader in ends]
            is_inside = all(value in self._inside for value in node.outputs)
            ends[node] = max(readers, default=at[node]) if is_inside else at[node]
        return ends

    @property
    def nodes(self) -> list[ir.Node]:
        return [*self.forward, *self.backward]

    def saved(self) -> list[ir.Value]:
        """Return the tensors of the forward pass that the backward pass reads, without views of them."""
        end = len(self.forward)
        return [v for v in self.tensors() if self._born[v] < end and self._reads.get(v, [0])[-1] >= end]

    def usage(self, bytes_of: Bytes, again: Iterable[LoweredBlock] = ()) -> Usage:
        """Return the memory used; what the blocks `again` compute is dropped, and recomputed in the backward pass."""
        end, count = len(self.forward), len(self.nodes)
        changes = np.zeros((2, count + 1), np.int64)
        saved, returns = {value: bytes_of(value) for value in self.saved()}, self._returns(again)
        for value in self.tensors():
            size, born, reads = bytes_of(value), self._born[value], self._reads.get(value, [])
            if value in self.gradients:
                changes[1, born] += size
                continue
            lives = [(born, max(reads, default=born))]
            if value in saved and value in returns:
                early = [at for at in reads if at < end]
                lives = [(born, max(early, default=born)), (returns[value], reads[-1])]
                saved.pop(value)
            for start, stop in lives:
                changes[0, start] += size
                changes[0, stop + 1] -= size
        for value in (node.outputs[0] for node in self._twice):
            changes[0, self._born[value]] += bytes_of(value)
            changes[0, self._born[value] + 1] -= bytes_of(value)
        activations, gradients = np.cumsum(changes[:, :count], axis=1)
        return Usage(sum(saved.values()), activations, gradients)

    def tensors(self) -> Iterable[ir.Value]:
        """Yield the outputs of nodes that take memory: neither views nor intermediate values of a kernel."""
        return (v for v in self._born if self._owner.get(v, v) is v and v not in self._inside)

    def _returns(self, again: Iterable[LoweredBlock]) -> dict[ir.Value, int]:
        """Return when each recomputed value is back: before the backward pass first reads its block."""
        end, returns = len(self.forward), {}
        for block in again:
            inside = set(block.nodes)
            outputs = {self._owner.get(v, v) for node in inside for v in node.outputs}
            own = [
                v
                for v in outputs
                if v in self._born and all(self.nodes[at] in inside for at in self._reads.get(v, []) if at < end)
            ]
            late = [at for v in own for at in self._reads.get(v, []) if at >= end]
            returns.update(dict.fromkeys(own, min(late, default=end)))
        return returns


def _in_order(graph: ir.Graph, gradients: Collection[ir.Value]) -> tuple[list[ir.Node], list[ir.Node]]:
    """Return the forward pass and the backward pass, in which each gradient is computed as soon as it can be."""
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
"""Operators that read only the shape, so that their input need not be in memory."""
_KEEPS_ORDER = {"Identity", "Squeeze", "Unsqueeze", "Flatten", "Reshape"}
_OTHER_ORDER = {"Transpose", "Slice", "Split", "Expand"}
"""Operators whose output is a view with other strides."""


def _owners(nodes: Iterable[ir.Node]) -> Mapping[ir.Value, ir.Value]:
    """Return the tensor of each view."""
    owner: dict[ir.Value, ir.Value] = {}
    scattered: set[ir.Value] = set()
    for node in nodes:
        source = node.inputs[0] if node.inputs else None
        if source is None or node.op_type not in _KEEPS_ORDER | _OTHER_ORDER:
            continue
        if source in scattered and node.op_type in ("Reshape", "Flatten"):
            continue  # a view with other strides cannot be reshaped without a copy
        owner.update(dict.fromkeys(node.outputs, owner.get(source, source)))
        if source in scattered or node.op_type in _OTHER_ORDER:
            scattered.update(node.outputs)
    return owner
