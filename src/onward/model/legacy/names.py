"""Names in a GraphProto: which a graph defines, and giving it others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from onnx import FunctionProto, GraphProto, NodeProto


def bodies(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs in a node's attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Nodes and those nested in them."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from all_nodes(body.node)


def defined_names(graph: GraphProto) -> set[str]:
    names = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    return names | {name for node in graph.node for name in node.output if name}


def defined_within(graph: GraphProto) -> set[str]:
    """With what nested graphs define."""
    return defined_names(graph).union(*(defined_within(body) for node in graph.node for body in bodies(node)))


def rename(graph: GraphProto, renames: Mapping[str, str]) -> None:
    for values in (graph.input, graph.output, graph.value_info):
        for value in values:
            value.name = renames.get(value.name, value.name)
    for tensor in graph.initializer:
        tensor.name = renames.get(tensor.name, tensor.name)
    for node in graph.node:
        rename_node(node, renames)


def rename_node(node: NodeProto, renames: Mapping[str, str]) -> None:
    node.input[:] = [renames.get(name, name) for name in node.input]
    node.output[:] = [renames.get(name, name) for name in node.output]
    if node.op_type == "Gradient":
        for attribute in node.attribute:
            texts = [text.decode() for text in attribute.strings]
            attribute.strings[:] = [renames.get(name, name).encode() for name in texts]
            if attribute.name == "y":
                name = attribute.s.decode()
                attribute.s = renames.get(name, name).encode()
    for body in bodies(node):
        shadowed = defined_names(body)
        rename(body, {old: new for old, new in renames.items() if old not in shadowed})


def strings(node: NodeProto, name: str) -> list[str]:
    return [text.decode() for attribute in node.attribute if attribute.name == name for text in attribute.strings]


def string(node: NodeProto, name: str) -> str | None:
    return next((attribute.s.decode() for attribute in node.attribute if attribute.name == name), None)


def set_nodes(graph: GraphProto | FunctionProto, nodes: Iterable[NodeProto]) -> None:
    kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]  # none may be lost with the list
    del graph.node[:]
    graph.node.extend(kept)
