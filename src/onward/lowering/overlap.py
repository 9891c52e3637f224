"""Sums over processes for which nothing has to wait: they are under way while something else is computed.

What follows from the batch alone, such as how many labels count, is summed up during the forward pass. What nothing in
the graph reads, such as the loss, is summed up while the forward pass is differentiated, which needs no more than to
know that it is a sum.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onward.lowering.sharing import is_all_reduce, is_common
from onward.model import Model
from onward.model.walk import ancestors, read_by
from onward.standard import IR_VERSION

_FEW = 20
"""Nodes that may well be computed once more."""


def split_off_first_sums(model: Model, batch: Collection[str]) -> Model | None:
    """A model that makes this process's part of the sums which follow from its batch alone, under the names that sums
    have as inputs of the given model, which is changed."""
    graph = model.graph
    sums = [node for node in graph if is_all_reduce(node) and not node.outputs[0].is_graph_output()]
    found = [node for node in sums if _follows_from(batch, node)]
    if not found:
        return None
    parts = [value for node in found for value in read_by(node)]
    nodes, reached = ancestors(parts)
    constants = [value for value in reached if value.is_initializer()]
    inputs = [value for value in graph.inputs if value in reached]
    imports = dict(model.ir.opset_imports)
    in_order = [node for node in graph if node in nodes]
    view = ir.GraphView(inputs, parts, nodes=in_order, initializers=constants, opset_imports=imports)
    functions = [function.clone() for function in model.functions.values()]
    first = Model(ir.Model(view.clone(), ir_version=model.ir.ir_version or IR_VERSION, functions=functions))
    for node, own in zip(found, first.graph.outputs, strict=True):
        total = node.outputs[0]
        own.name = total.name
        given = ir.Value(name=total.name, type=total.type, shape=total.shape)
        total.replace_all_uses_with(given)
        graph.inputs.append(given)
        graph.remove(node, safe=True)
    return first


def _follows_from(batch: Collection[str], node: ir.Node) -> bool:
    """Whether what a node reads takes no more than the batch, and little time."""
    nodes, reached = ancestors(read_by(node))
    given = [value for value in reached if value.producer() is None and not value.is_initializer()]
    return len(nodes) <= _FEW and not any(map(is_all_reduce, nodes)) and all(value.name in batch for value in given)


def leave_last_sums(model: Model) -> list[str]:
    """Let outputs be this process's part of sums that nothing reads, in place of the sums; which these are."""
    outputs = model.graph.outputs
    left = []
    for node in [node for node in model.graph if is_all_reduce(node) and is_common(node)]:
        local, total = node.inputs[0], node.outputs[0]
        if local is None or local.producer() is None or local in outputs or total not in outputs or total.uses():
            continue
        outputs[:] = [local if output is total else output for output in outputs]
        model.graph.remove(node, safe=True)
        local.name = total.name
        left.append(local.name or "")
    return left
