"""Graphs nested in nodes, as rules see them: what they read from outside, and what they compute, once more.

A nested graph reads values of the graphs around it without naming them as inputs: it captures them. What it computes is
not visible outside, so the graph of a gradient computes it again.
"""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onward.build import Builder
from onward.errors import UnsupportedError
from onward.model.walk import captured_values, graphs_in, is_random, nested_graphs, nested_nodes
from onward.shapes import is_sequence
from onward.standard import IR_VERSION
from onward.transform.types import value_types


def captured_and_active(node, active):
    refuse_random(node)
    inner = [inner for graph in nested_graphs(node) for inner in graph]
    return [
        value for value in captured_values(inner) if value in active and value.graph not in tuple(nested_graphs(node))
    ]


def copy_graph(op: Builder, graph: ir.Graph) -> ir.Graph:
    """A nested graph once more, its values and nodes under names of their own."""
    copy = graph.clone(allow_outer_scope_values=True)
    for inner in graphs_in(copy):
        for value in (*inner.inputs, *inner.initializers.values(), *(v for node in inner for v in node.outputs)):
            if value.name:
                value.name = op.names.fresh(value.name)
        for node in inner:
            node.name = op.names.fresh(node.name or node.op_type)
    return copy


def recompute(op, graph, given):
    """The nodes of a nested graph once more, reading `given` for its inputs, in the graph of `op`; and its outputs."""
    copy = copy_graph(op, graph)
    new = {old: expr.value for old, expr in zip(copy.inputs, given, strict=True)}
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
    """Types and shapes of what the nodes compute, as far as they follow from what they read."""
    read = [value for value in captured_values(nodes) if value.type is not None]
    # Declared symbols may be of the nested graph alone, so only numbers are certain.
    untyped = {v.name: v for node in nodes for v in node.outputs if v.name and not (v.type and _is_static(v.shape))}
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
                if dim.dim_param not in symbols:  # made up by inference: it may mean something else in another graph
                    dim.ClearField("dim_param")
            ir.serde.deserialize_value_info_proto(types[name], value)
        if value.shape is None:
            value.shape = declared[name]


def _tensor_type(type_proto):
    """What a type says about tensors: those in a sequence or an Optional, if it is that of one."""
    while (kind := type_proto.WhichOneof("value")) in ("sequence_type", "optional_type"):
        type_proto = getattr(type_proto, kind).elem_type
    return type_proto.tensor_type


def seeds_of(op, outputs, dys):
    """The gradients of the outputs of a nested graph, one value of which may be several of them."""
    seeds = {}
    for value, dy in zip(outputs, dys, strict=False):  # a body may put out more: its inputs, to be saved
        if dy is not None and is_float(value):
            seeds[value] = seeds[value] + op(dy.value) if value in seeds else op(dy.value)
    return seeds


def refuse_random(node):
    for inner in nested_nodes(node):
        if is_random(inner):
            raise UnsupportedError(
                f"`{inner.op_type}` (node `{inner.name}`) inside `{node.op_type}` (node `{node.name}`) draws random "
                "numbers: its gradient, which computes the nested graph again, would draw others",
                hint="draw them before the node, for all iterations at once",
            )


def refuse_sequences(node, captured):
    for value in captured:
        if is_sequence(value):
            raise UnsupportedError(
                f"the body of `{node.op_type}` (node `{node.name}`) reads the sequence `{value.name}` as a whole: its "
                f"gradient is a sequence that every iteration adds to, and `{node.op_type}` carries only tensors",
                hint="write it as a Loop, or make the sequence one tensor before, with ConcatFromSequence",
            )


def _is_static(shape):
    return shape is not None and all(isinstance(size, int) for size in shape)


def is_float(value):
    return value.dtype is not None and value.dtype.is_floating_point()


def several(results):
    return results if isinstance(results, tuple) else (results,)


def sum_by_value(gradients):
    """Pairs of values and gradients, by value: one that is there twice has the sum."""
    found = {}
    for value, dx in gradients:
        found[value] = found[value] + dx.like(value) if value in found else dx.like(value)
    return found
