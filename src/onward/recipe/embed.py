"""Putting another model's graph into a training step: a loss that somebody drew, or a teacher."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onward.model import Model
from onward.recipe.assembly import Assembly


def embed(assembly: Assembly, model: Model, sources: Mapping[ir.Value, ir.Value]) -> None:
    """Move the nodes and constants of a model, which is used up, into the algorithm, where its inputs are `sources`."""
    for value, source in sources.items():
        value.replace_all_uses_with(source)
    nodes, constants = take_apart(model.graph)
    for constant in constants:
        constant.name = assembly.op.names.fresh(constant.name or "constant")
        assembly.step.algorithm.register_initializer(constant)
    for node in nodes:
        for output in node.outputs:
            output.name = assembly.op.names.fresh(output.name) if output.name else output.name
    assembly.step.algorithm.extend(nodes)
    assembly.model.functions.update(model.functions)
    for domain, version in model.ir.opset_imports.items():
        assembly.model.ir.opset_imports.setdefault(domain, version)


def take_apart(graph: ir.Graph) -> tuple[list[ir.Node], list[ir.Value]]:
    """The nodes and constants of a graph that is used up: they belong to none, and can be put into another."""
    nodes, constants = list(graph), list(graph.initializers.values())
    graph.inputs.clear()
    graph.outputs.clear()
    graph.initializers.clear()
    graph.remove(nodes)
    return nodes, constants
