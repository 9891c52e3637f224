"""What is new of the state where the loss is a number, and the old state where it is not: as nodes of the step.

What is computed of new state, as a parameter is of new moments, then reads the choice and not what was chosen from.
Otherwise an engine that writes new state over the old would have to keep a copy of the old, to compute it again from.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onward.lowering.contract import Contract
from onward.model import Model
from onward.model.core import is_gradient, string
from onward.model.walk import ancestors


def keep_unless_finite(model: Model, contract: Contract) -> dict[str, str]:
    """Write it into a step, and say which output replaces which state."""
    graph = model.graph
    outputs = {value.name: value for value in graph.outputs}
    loss = outputs[contract.loss]
    fixed = _leading_to(graph, (outputs[name] for name in (*contract.metrics, *contract.outputs)))
    truth = ir.TensorType(ir.DataType.BOOL)
    bad = _append(graph, "Or", [_append(graph, name, [loss], truth) for name in ("IsNaN", "IsInf")], truth)
    old = {value.name: value for value in graph.inputs}
    kept = {}
    for name, output in contract.update.items():
        value = outputs[output]
        users = [(user, index) for user, index in value.uses() if user.graph is graph and user not in fixed]
        made = _append(graph, "Where", [bad, old[name], value], value.type, value.shape)
        for user, index in users:
            user.replace_input_with(index, made)
        graph.outputs.append(made)
        kept[name] = made.name or ""
    graph.sort()
    return kept


def _leading_to(graph: ir.Graph, shown: Iterable[ir.Value]) -> set[ir.Node]:
    """The nodes that results are computed by, and what is differentiated: these stay as they are."""
    ends = set(shown)
    gradients = set(filter(is_gradient, graph))
    made = {value.name: value for node in graph for value in node.outputs}
    for node in gradients:
        ends.update(value for value in (*node.inputs, made.get(string(node, "y"))) if value is not None)
    return ancestors(ends)[0] | gradients


def _append(
    graph: ir.Graph, operator: str, inputs: list[ir.Value], type: ir.TypeProtocol | None, shape: ir.Shape | None = None
) -> ir.Value:
    node = ir.node(operator, inputs)
    graph.append(node)
    (made,) = node.outputs
    made.type, made.shape = type, shape
    return made
