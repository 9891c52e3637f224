"""Giving names in a GraphProto: others for values, and what attributes say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onnx import FunctionProto, GraphProto, NodeProto

from onward.model.protos import bodies, definitions, replace_entries


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
        shadowed = set(definitions(body))
        rename(body, {old: new for old, new in renames.items() if old not in shadowed})


def strings(node: NodeProto, name: str) -> list[str]:
    return [text.decode() for attribute in node.attribute if attribute.name == name for text in attribute.strings]


def string(node: NodeProto, name: str) -> str | None:
    return next((attribute.s.decode() for attribute in node.attribute if attribute.name == name), None)


def set_nodes(graph: GraphProto | FunctionProto, nodes: Iterable[NodeProto]) -> None:
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]  # none may be lost with the list
    replace_entries(graph.node, copies)
