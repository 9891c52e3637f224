"""Weights in the bodies of If, Loop and Scan: in the main graph while they are trained, then back in place.

Bodies read the values around them, so a tensor has the same meaning in the main graph. There, everything that handles
weights finds it. Its tag tells where it came from.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.constants import constant_tensor, tensor_in
from onward.model import Model
from onward.model.state import BODIES_KEY, with_metadata
from onward.model.walk import graphs_in

Path = tuple[tuple[str, str], ...]
"""The way to a body: for each node around it, its first output and the attribute."""


class Place(NamedTuple):
    """Location of a tensor in a body."""

    path: Path
    name: str
    in_node: bool
    """True in a Constant node, False in an initializer."""


def stored_in_bodies(graph: ir.Graph, path: Path = ()) -> Iterator[tuple[Place, ir.Value]]:
    """Return the floating-point tensors in the bodies of a graph, with their places."""
    for node, attribute in _bodies(graph):
        body, at = attribute.as_graph(), (*path, (_first_output(node), attribute.name))
        stored = [*body.initializers.values(), *(inner.outputs[0] for inner in body if tensor_in(inner) is not None)]
        for value in stored:
            tensor = constant_tensor(value)
            if tensor is not None and tensor.dtype.is_floating_point() and value.name and value not in body.inputs:
                yield Place(at, value.name, value.producer() is not None), value
        yield from stored_in_bodies(body, at)


def _bodies(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Attr]]:
    for node in graph:
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.GRAPH and not attribute.is_ref():
                yield node, attribute


def _first_output(node: ir.Node) -> str:
    return next((output.name for output in node.outputs if output.name), "")


# ---- to the main graph -----------------------------------------------------------------------------------------------


def lift_from_bodies(model: Model) -> set[str]:
    """Move the floating-point tensors of bodies to the main graph, in place; return their names.

    Equal tensors in the branches of an If are one tensor. If their numbers are all the same, as those of new biases,
    this holds if the layers share a weight.
    """
    stored, names = list(stored_in_bodies(model.graph)), model.names()
    counts = Counter(place.name for place, _ in stored)
    lifted: list[tuple[ir.Value, list[Place]]] = []
    for place, value in sorted(stored, key=lambda item: _is_uniform(item[1])):
        for first, places in lifted:
            if all(_are_branches(place.path, other.path) for other in places) and _is_same(value, first):
                places.append(place)
                break
        else:
            tensor = constant_tensor(value)
            assert tensor is not None
            name = place.name if counts[place.name] == 1 else names.fresh("/".join((*place.path[-1], place.name)))
            first = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()))
            first.const_value = tensor
            lifted.append((first, [place]))
        _read_instead(value, first)
    for value, places in lifted:
        assert value.const_value is not None
        tags = {**value.const_value.metadata_props, BODIES_KEY: json.dumps(places)}
        value.const_value = _named(value.name, value.const_value, tags)
        model.graph.register_initializer(value)
    return {value.name or "" for value, _ in lifted}


def _named(name: str | None, tensor: ir.TensorProtocol, metadata: dict[str, str]) -> ir.TensorProtocol:
    named = with_metadata(tensor, metadata)
    named.name = name
    return named


def _are_branches(a: Path, b: Path) -> bool:
    """True if two bodies are in different branches of an If: at most one of them runs."""
    differ = next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), None)
    return differ is not None and a[differ][0] == b[differ][0] and a[differ][1] in ("then_branch", "else_branch")


def _is_uniform(value: ir.Value) -> bool:
    tensor = constant_tensor(value)
    return tensor is not None and (tensor.size < 2 or bool((tensor.numpy() == tensor.numpy().flat[0]).all()))


def _is_same(value: ir.Value, lifted: ir.Value) -> bool:
    here, there = constant_tensor(value), lifted.const_value
    assert here is not None and there is not None
    if here.dtype != there.dtype or here.shape.numpy() != there.shape.numpy():
        return False
    if not np.array_equal(here.numpy(), there.numpy()):
        return False
    layers = [{(u.node.op_type, u.idx, u.node.inputs[1]) for u in v.uses() if u.idx > 1} for v in (value, lifted)]
    return not _is_uniform(value) or bool(layers[0] & layers[1])


def _read_instead(value: ir.Value, lifted: ir.Value) -> None:
    """Replace a tensor of a body by one around it. An output of the body needs a node there."""
    graph, node = value.graph, value.producer()
    assert graph is not None
    if value.is_graph_output():
        copy = ir.node("Identity", [lifted])
        copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
        graph.append(copy)
        name, value.name = value.name, None
        value.replace_all_uses_with(copy.outputs[0], replace_graph_outputs=True)
        copy.outputs[0].name = name
        graph.initializers.pop(name or "", None)
    else:
        value.replace_all_uses_with(lifted)
        graph.initializers.pop(value.name or "", None)
    if node is not None:
        graph.remove(node)


# ---- back to the bodies ----------------------------------------------------------------------------------------------


def return_to_bodies(model: Model, names: Collection[str] | None = None) -> None:
    """Store lifted tensors in their bodies again, in place (default: all). What is read elsewhere stays."""
    bodies: dict[Path, tuple[ir.Graph, list[ir.Node]]] = {}
    for value in list(model.graph.initializers.values()):
        places = places_of(value.const_value)
        if not places or (names is not None and value.name not in names):
            continue
        for place in places:
            if place.path not in bodies and (body := body_at(model.graph, place.path)) is not None:
                bodies[place.path] = body, list(body.all_nodes())
        read = [[u for u in value.uses() if u.node in bodies.get(p.path, (None, []))[1]] for p in places]
        if sum(map(len, read)) == len(value.uses()) and not value.is_graph_output():
            model.graph.initializers.pop(value.name or "")
            for place, uses in zip(places, read, strict=True):
                if uses:
                    _store(model, bodies[place.path][0], place, value, uses)


def places_of(tensor: ir.TensorProtocol | None) -> list[Place]:
    """Return the places of a tensor in bodies, by its tag; none if the tag is malformed."""
    text = tensor.metadata_props.get(BODIES_KEY) if tensor is not None else None
    try:
        rows = json.loads(text) if text else []
        return [Place(tuple((str(n), str(a)) for n, a in path), str(name), bool(kind)) for path, name, kind in rows]
    except (ValueError, TypeError):
        return []


def body_at(graph: ir.Graph, path: Path) -> ir.Graph | None:
    """Return the body at the end of a path, if the graph has it."""
    for output, name in path:
        inner = [a.as_graph() for n, a in _bodies(graph) if a.name == name and _first_output(n) == output]
        if not inner:
            return None
        graph = inner[0]
    return graph


def _store(model: Model, body: ir.Graph, place: Place, value: ir.Value, uses: Sequence[Any]) -> None:
    assert value.const_value is not None
    copies = [u.node for u in uses if u.node.op_type == "Identity" and u.node.outputs[0].name == place.name]
    taken = {v.name for graph in graphs_in(body) for n in graph for v in n.outputs if n not in copies}
    name = value.name if place.name in taken or place.name in model.graph.initializers else place.name
    tags = {key: text for key, text in value.const_value.metadata_props.items() if key != BODIES_KEY}
    tensor = _named(name, value.const_value, tags)
    if place.in_node:
        node = ir.node("Constant", [], {"value": tensor})
        stored = node.outputs[0]
        body.insert_before(body[0], node)
    else:
        stored = ir.Value(const_value=tensor)
    stored.type, stored.shape = value.type, value.shape
    for use in uses:
        use.node.replace_input_with(use.idx, stored)
    for copy in copies:
        copy.outputs[0].name = None
        copy.outputs[0].replace_all_uses_with(stored, replace_graph_outputs=True)
        body.remove(copy, safe=True)
    stored.name = name
    if not place.in_node:
        body.register_initializer(stored)
