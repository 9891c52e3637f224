"""A lowered model as a part of a larger graph, such as the body of a Loop."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onward.build import Builder, Expr
from onward.model import Model
from onward.model.core import values
from onward.model.walk import graphs_in


class Embedding:
    """Puts lowered models into graphs that are nested in one. Their constants go to the outermost one, each once."""

    def __init__(self, outermost: ir.Graph):
        self._outermost = outermost
        self._kept: dict[int, ir.Value] = {}
        """By tensor, the constant that holds it."""

    def __call__(self, op: Builder, model: Model, scope: str, inputs: Mapping[str, Expr]) -> dict[str, Expr]:
        """Append what a model computes, and is then without; its outputs by name."""
        graph = model.graph
        names = [value.name or "" for value in graph.outputs]
        for value in graph.inputs:
            value.replace_all_uses_with(inputs[value.name or ""].value, replace_graph_outputs=True)
        self._keep_constants(op, graph, scope)
        outputs = dict(zip(names, graph.outputs, strict=True))
        graph.outputs.clear()
        for inner in graphs_in(graph):
            for value in values(inner):
                value.name = op.names.fresh(f"{scope}/{value.name}") if value.name else value.name
            for node in inner:
                node.name = op.names.fresh(f"{scope}/{node.name or node.op_type}")
        nodes = list(graph)
        graph.remove(nodes)
        op.graph.extend(nodes)
        return {name: op(value) for name, value in outputs.items()}

    def _keep_constants(self, op: Builder, graph: ir.Graph, scope: str) -> None:
        for value in list(graph.initializers.values()):
            tensor = value.const_value
            known = self._kept.setdefault(id(tensor), value)
            graph.initializers.pop(value.name or "")
            if known is value:
                value.name = op.names.fresh(f"{scope}/{value.name}")
                self._outermost.register_initializer(value)
            else:
                value.replace_all_uses_with(known, replace_graph_outputs=True)
