"""Operators of the drafts as the standard has them: their domain, their inputs, and a loss that it does not have."""

from __future__ import annotations

from collections.abc import Collection

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, helper

from onward.build import Names
from onward.errors import UnsupportedError
from onward.model.legacy import calls
from onward.model.legacy.names import set_nodes, string, strings
from onward.model.protos import bodies, names_within, replace_entries
from onward.standard import FUNCTIONS_IR, TRAINING_IR

_TRAINING = "ai.onnx.preview.training"
_OPTIMIZERS = ("Adagrad", "Adam", "Momentum")
_LOSSES = ("MSE", "MeanSquaredError")
_LOCAL = "local"
"""The domain of functions, which had none."""
_REDUCTIONS = {"mean": "ReduceMean", "sum": "ReduceSum"}


def convert(proto: ModelProto, functions: Collection[str]) -> list[str]:
    graphs = [proto.graph, *(step.algorithm for step in proto.training_info)]
    names = Names(set().union(*(names_within(graph) for graph in graphs)))
    notes: dict[str, None] = {}
    holders: list[GraphProto | FunctionProto] = [*graphs, *proto.functions]
    for holder in holders:
        _convert(holder, functions, names, notes)
    imports = {entry.domain: entry.version for entry in proto.opset_import if entry.domain != "ai.onnx.training"}
    imports |= {_TRAINING: 1, **({_LOCAL: 1} if functions else {})}
    replace_entries(proto.opset_import, (helper.make_opsetid(*entry) for entry in imports.items()))
    for function in proto.functions:
        if function.name in functions:
            function.domain = _LOCAL
            function.DiscardUnknownFields()  # since when it was in the standard, and whether for good
            function.opset_import.extend(proto.opset_import)
    proto.ir_version = max(proto.ir_version, FUNCTIONS_IR if functions else TRAINING_IR)
    return list(notes)


def _convert(
    holder: GraphProto | FunctionProto, functions: Collection[str], names: Names, notes: dict[str, None]
) -> None:
    nodes: list[NodeProto] = []
    for node in holder.node:
        for body in bodies(node):
            _convert(body, functions, names, notes)
        if node.domain not in calls.DOMAINS:
            nodes.append(node)
            continue
        if node.op_type in functions:
            node.domain = _LOCAL
        elif node.op_type == "Graph":  # its name is the graph's; later drafts said it in an attribute
            node.op_type, node.domain = calls.OPERATOR, _TRAINING
            node.attribute.append(helper.make_attribute("graph_name", node.name))
        elif node.op_type in (*_OPTIMIZERS, "Gradient", calls.OPERATOR):
            node.domain = _TRAINING
            if node.op_type == "Gradient":
                _complete(node)
        elif node.op_type in _LOSSES:
            reduction = string(node, "reduction") or "mean"
            nodes += _squared_error(node, reduction, names)
            notes[f"the loss `{node.op_type}` of the drafts, read as the {reduction} of squared differences"] = None
            continue
        nodes.append(node)
    set_nodes(holder, nodes)


def _complete(gradient: NodeProto) -> None:
    """Name the inputs beyond `xs` in `zs`: the demonstration of 2019 passed all inputs of the graph, in any order."""
    xs, inputs = strings(gradient, "xs"), list(gradient.input)
    if len(inputs) <= len(xs) or strings(gradient, "zs"):
        return
    if not set(xs) <= set(inputs):
        raise UnsupportedError(
            f"a Gradient of a draft of 2019 has {len(inputs)} inputs for {len(xs)} names in `xs`: "
            "it is unclear which stands for which",
            hint="make the model again from its inference graph with `onward prepare`",
        )
    zs = [name for name in inputs if name not in xs]
    gradient.input[:] = [*xs, *zs]
    gradient.attribute.append(helper.make_attribute("zs", zs))


def _squared_error(node: NodeProto, reduction: str, names: Names) -> list[NodeProto]:
    """`MeanSquaredError` as it was proposed in 2019, and `MSE` as the demonstration of that year called it."""
    if reduction not in _REDUCTIONS or not 2 <= len(node.input) <= 3 or len(node.output) != 1:
        raise UnsupportedError(
            f"the loss `{node.op_type}` of the drafts of 2019 is read with two inputs, or weights as a third one, and "
            f"with the reduction mean or sum: not with {len(node.input)} inputs and `{reduction}`",
            hint="write the loss with operators of the standard",
        )
    difference, squares = names.fresh("difference"), names.fresh("squares")
    nodes = [
        helper.make_node("Sub", node.input[:2], [difference]),
        helper.make_node("Mul", [difference, difference], [squares]),
    ]
    if len(node.input) == 3:
        weighted = names.fresh("weighted")
        nodes.append(helper.make_node("Mul", [node.input[2], squares], [weighted]))
        squares = weighted
    return [*nodes, helper.make_node(_REDUCTIONS[reduction], [squares], node.output, keepdims=0)]


def group(optimizer: NodeProto, gradients: Collection[str]) -> None:
    """Order inputs as operators have them: all tensors, then all gradients, then each kind of state.

    The demonstration of 2019 gave each tensor with its gradient and state; where the gradients stand tells.
    """
    count, states = len(gradients), list(optimizer.input[2:])
    width = len(states) // count
    if count > 1 and len(states) % count == 0 and set(states[1::width]) == set(gradients):
        results = list(optimizer.output)
        kinds = len(results) // count
        optimizer.input[2:] = [name for kind in range(width) for name in states[kind::width]]
        optimizer.output[:] = [name for kind in range(kinds) for name in results[kind::kinds]]
