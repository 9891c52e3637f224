"""Graphs nested in nodes, for rules: captured values, and a copy of the nodes in another graph.

A nested graph reads values of the graphs around it that are not its inputs: it captures them. Its own values are not
visible outside, so the gradient graph computes them again.
"""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onward.build import Builder
from onward.errors import UnsupportedError
from onward.model.walk import captured_values, graphs_in, is_random, nested_graphs, nested_nodes
from onward.shapes import is_sequence
from onward.standard import IR_VERSION
from onward.transform.types import is_static, value_types


def captured_and_active(node, active):
    refuse_random(node)
    inner = [inner for graph in nested_graphs(node) for inner in graph]
    return [
        value for value in captured_values(inner) if value in active and value.graph not in tuple(nested_graphs(node))
    ]


def copy_graph(op: Builder, graph: ir.Graph) -> ir.Graph:
    """Return a copy of a nested graph with new names of values and nodes."""
    copy = graph.clone(allow_outer_scope_values=True)
    for inner in graphs_in(copy):
        for value in (*inner.inputs, *inner.initializers.values(), *(v for node in inner for v in node.outputs)):
            if value.name:
                value.name = op.names.fresh(value.name)
        for node in inner:
            node.name = op.names.fresh(node.name or node.op_type)
    return copy


def recompute(op, graph, inputs):
    """Copy the nodes of a nested graph into the graph of `op`, reading `inputs`; return nodes and outputs.

    None stands for an input that nothing reads.
    """
    copy = copy_graph(op, graph)
    new = {old: expr.value for old, expr in zip(copy.inputs, inputs, strict=True) if expr is not None}
    for value in copy.initializers.values():
        new[value] = op.constant(value.const_value.numpy(), value.const_value.dtype).value
    outputs = [new.get(value, value) for value in copy.outputs]
    copy.outputs.clear()
    for old, value in new.items():
        old.replace_all_uses_with(value)
    nodes = list(copy)
    copy.remove(nodes)
    op.graph.extend(nodes)
    fill_in_types_of(op, nodes)
    return nodes, outputs


def fill_in_types_of(op: Builder, nodes: Sequence[ir.Node]) -> None:
    """Infer types and shapes of the outputs of nodes from their inputs, in place."""
    read = [value for value in captured_values(nodes) if value.type is not None]
    # Declared symbols may be of the nested graph alone, so only numbers are certain.
    untyped = {v.name: v for node in nodes for v in node.outputs if v.name and not is_static(v)}
    if not untyped:
        return
    declared = {name: value.shape for name, value in untyped.items()}
    for value in untyped.values():
        value.shape = None
    view: Any = ir.GraphView(read, [], nodes=nodes, opset_imports={**op.imports, "": op.opset}, name="nodes")
    functions = list(op.functions.values())
    types = value_types(ir.serde.serialize_model(ir.Model(view, ir_version=IR_VERSION, functions=functions)))
    symbols = {str(d.value) for v in read if v.shape is not None for d in v.shape if isinstance(d, ir.SymbolicDim)}
    for name, value in untyped.items():
        if name in types:
            for dim in _tensor_type(types[name].type).shape.dim:
                if dim.dim_param not in symbols:  # from inference: it may mean another size in another graph
                    dim.ClearField("dim_param")
            ir.serde.deserialize_value_info_proto(types[name], value)
        if value.shape is None:
            value.shape = declared[name]


def _tensor_type(type_proto):
    """Return the type of the tensors in a sequence or Optional, or a tensor type itself."""
    while (variant := type_proto.WhichOneof("value")) in ("sequence_type", "optional_type"):
        type_proto = getattr(type_proto, variant).elem_type
    return type_proto.tensor_type


def gradients_or_zeros(op, pull_back, nodes, seeds, values):
    grads = pull_back(op, nodes, seeds, values)
    return [grads[value] if value in grads else op.filled_like(value, 0) for value in values]


def seeds_of(op, outputs, dys):
    """Return value -> gradient for the outputs of a nested graph; a value that is several outputs gets the sum."""
    seeds = {}
    for value, dy in zip(outputs, dys, strict=False):  # a body may have more outputs: its saved inputs
        if dy is not None and is_float(value):
            seeds[value] = seeds[value] + op(dy.value) if value in seeds else op(dy.value)
    return seeds


def refuse_random(node):
    for inner in nested_nodes(node):
        if is_random(inner):
            raise UnsupportedError(
                f"`{inner.op_type}` (node `{inner.name}`) inside `{node.op_type}` (node `{node.name}`) draws random "
                "numbers: the gradient, which recomputes the nested graph, would draw others",
                hint="draw the numbers of all iterations before the node",
            )


def refuse_sequences(node, captured):
    for value in captured:
        if is_sequence(value):
            raise UnsupportedError(
                f"the body of `{node.op_type}` (node `{node.name}`) captures the sequence `{value.name}`, "
                f"whose gradient `{node.op_type}` cannot carry",
                hint="write it as a `Loop`, or apply `ConcatFromSequence` to the sequence before it",
            )


def is_float(value):
    return value.dtype is not None and value.dtype.is_floating_point()


def several(results):
    return results if isinstance(results, tuple) else (results,)


def sum_by_value(gradients):
    """Return value -> gradient from pairs; the gradients of a value in several pairs are added."""
    sums = {}
    for value, dx in gradients:
        sums[value] = sums[value] + dx.like(value) if value in sums else dx.like(value)
    return sums
