"""What Gradients name. The names mean what they would mean to any node in that place: in a function its own values, in
a nested graph also those of the graphs around it.

Names are text, which does not follow a value that is renamed or put into another graph. While graphs are rewritten a
Gradient may be tied to the values: they are further inputs then, which are copied and replaced like others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from onward.model.core import is_gradient, string, strings, values
from onward.model.walk import nested_graphs

_TIED = "onward.tied"


def gradients_in(graph: ir.Graph, around: Sequence[ir.Graph] = ()) -> Iterator[tuple[ir.Node, tuple[ir.Graph, ...]]]:
    """Each Gradient, those in nested graphs included, in an order in which none needs a later one; and its scope."""
    scope = (*around, graph)
    for node in graph:
        for inner in nested_graphs(node):
            yield from gradients_in(inner, scope)
        if is_gradient(node):
            yield node, scope


def visible(scope: Sequence[ir.Graph]) -> dict[str, ir.Value]:
    """Values by name; `scope` are graphs each of which is nested in the one before."""
    return {value.name: value for graph in scope for value in values(graph) if value.name}


def names_of(node: ir.Node) -> tuple[str, ...]:
    """All that a Gradient names: `xs`, `zs` and `y`."""
    return (*strings(node, "xs"), *strings(node, "zs"), string(node, "y"))


def tie(graph: ir.Graph, around: Sequence[ir.Graph] = ()) -> None:
    """Make the values that Gradients name further inputs of them; one that names what does not exist stays."""
    for node, scope in list(gradients_in(graph, around)):
        known = visible(scope)
        if _TIED not in node.attributes and all(name in known for name in names_of(node)):
            start = append_inputs(node, [known[name] for name in names_of(node)])
            node.attributes[_TIED] = ir.AttrInt64(_TIED, start)


def tie_function(function: ir.Function) -> None:
    """The same in a function, whose inputs are independent of each other, whatever a call gives for them."""
    graph = function.graph
    named = {name for node, _ in gradients_in(graph) for name in names_of(node)}
    for value in [value for value in graph.inputs if value.name in named]:
        own = ir.Node("", "Identity", [value])
        value.replace_all_uses_with(own.outputs[0])
        own.replace_input_with(0, value)
        own.outputs[0].name, own.outputs[0].type, own.outputs[0].shape = f"{value.name}/own", value.type, value.shape
        graph.insert_before(graph[0], own)
        rename_in_gradients(graph, {value.name or "": own.outputs[0].name})
    tie(graph)


def append_inputs(node: ir.Node, more: Sequence[ir.Value]) -> int:
    """Give a node further inputs; the place of the first of them."""
    start = len(node.inputs)
    node.resize_inputs(start + len(more))
    for i, value in enumerate(more, start):
        node.replace_input_with(i, value)
    return start


def untie(graph: ir.Graph) -> None:
    """Write the names of what Gradients are tied to into them."""
    for node in graph.all_nodes():
        if _TIED in node.attributes:
            start = node.attributes.pop(_TIED).as_int()
            name = {
                old: value.name or "" for old, value in zip(names_of(node), node.inputs[start:], strict=True) if value
            }
            node.resize_inputs(start)
            _rename(node, name)


def rename_in_gradients(graph: ir.Graph, names: Mapping[str, str]) -> None:
    """Change names in the Gradients of a graph."""
    for node in graph.all_nodes():
        if is_gradient(node):
            _rename(node, names)


def _rename(node: ir.Node, names: Mapping[str, str]) -> None:
    for key in ("xs", "zs"):
        if old := strings(node, key):
            node.attributes[key] = ir.AttrStrings(key, [names.get(name, name) for name in old])
    if y := string(node, "y"):
        node.attributes["y"] = ir.AttrString("y", names.get(y, y))
