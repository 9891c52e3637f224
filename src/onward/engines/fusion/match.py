"""What the patterns have in common."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import Any

import onnx_ir as ir

from onward.engines.framework import Framework
from onward.standard import is_standard


@dataclasses.dataclass(frozen=True)
class Match(ABC):
    """Nodes that amount to one operator of a framework."""

    nodes: Sequence[ir.Node]
    """The last one has the output."""

    @property
    def output(self) -> ir.Value:
        return self.nodes[-1].outputs[0]

    @property
    @abstractmethod
    def inputs(self) -> list[ir.Value]:
        """What it has to know."""

    @abstractmethod
    def compute(self, framework: Framework, values: dict[ir.Value, Any]) -> Any:
        """The output by the operator; NotImplemented where, by the numbers, the nodes are something else."""


class Following:
    """Goes from node to node against the flow, as long as nobody else reads what is computed there."""

    def __init__(self, among: Container[ir.Node], kept: Container[ir.Value]):
        self._among = among
        self._kept = kept
        self.nodes: list[ir.Node] = []
        """The nodes of the match so far."""

    def inside(self, value: ir.Value | None) -> ir.Node | None:
        """The node that computes a value which is not kept for others."""
        node = value.producer() if value is not None else None
        if node is None or node not in self._among or value in self._kept or not is_standard(node):
            return None
        return node

    def only(self, value: ir.Value | None, *operators: str) -> ir.Node | None:
        """The same, if it is one of some operators, and has a single reader."""
        node = self.inside(value)
        return node if node is not None and node.op_type in operators and len(readers(node)) == 1 else None


def readers(node: ir.Node) -> set[ir.Node]:
    return {reader for output in node.outputs for reader, _ in output.uses()}
