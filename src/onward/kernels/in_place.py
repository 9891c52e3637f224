"""State that a step writes into the memory that it was read from, instead of a second one of the same size.

A node may write there when nothing else will read the old value. So all that is no update comes first: `Ready` takes
what is computed last of it, and all updates take `Ready`: ONNX Runtime knows no other way to say what comes first. An
update reads each block of a tensor before it writes it, and leaves all as it was if the loss is not finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

import onnx_ir as ir

from onward.build import Names
from onward.kernels.library import DOMAIN
from onward.kernels.updates import ELEMENTWISE
from onward.model import Model


def update_in_place(model: Model, update: Mapping[str, str], loss: str | None) -> set[str]:
    """Let state be written in place where that is right, and say which. `update` has the new value of each by name."""
    graph = model.graph
    results = {value.name: value for value in graph.outputs}
    given = {value.name: value for value in graph.inputs}
    minimised = results.get(loss)
    if minimised is None or minimised.dtype != ir.DataType.FLOAT:
        return set()
    updates, inside = _updates(graph)
    in_place = {
        name
        for name, new in update.items()
        if name in given and new in results and _is_written_last(given[name], results[new], inside)
    }
    if in_place:
        _put_last(graph, updates, inside, minimised, model.names())
    return in_place


def _updates(graph: ir.Graph) -> tuple[list[ir.Node], set[ir.Node]]:
    """The nodes that make updates which nothing but other updates read; and these with all nodes in their branches."""
    found: list[ir.Node] = []
    inside: set[ir.Node] = set()
    for node in reversed(graph):
        executed = set(_executed(node))
        if any(map(_is_update, executed)) and all(use.node in inside for value in node.outputs for use in value.uses()):
            found.append(node)
            inside |= executed
    return found[::-1], inside


def _executed(node: ir.Node) -> Iterator[ir.Node]:
    """A node, and all in the branches that it chooses from: an update may be made now and then."""
    yield node
    if node.op_type == "If":
        for branch in _branches(node):
            yield from branch.all_nodes()


def _branches(node: ir.Node) -> Iterator[ir.Graph]:
    return (attribute.as_graph() for attribute in node.attributes.values())


def _is_update(node: ir.Node) -> bool:
    return node.op_type == ELEMENTWISE and node.domain == DOMAIN


def _is_written_last(state: ir.Value, new: ir.Value, updates: Set[ir.Node]) -> bool:
    """Whether, of all updates, only the computation of its new value reads a state, and that element by element."""
    node = new.producer()
    if node is None or node not in updates:
        return False
    ends = [new] if _is_update(node) else [branch.outputs[new.index() or 0] for branch in _branches(node)]
    readers = [use for use in state.uses() if use.node in updates]
    return len(readers) == len(ends) and all(any(_writes_over(*use, end) for use in readers) for end in ends)


def _writes_over(node: ir.Node, index: int, new: ir.Value) -> bool:
    """Whether what a node reads as one of its inputs only goes to the same elements of `new`."""
    if node is not new.producer():
        return False
    if not _is_update(node):
        return node.op_type == "Identity"
    numbers, tensors = (node.attributes[name].as_int() for name in ("numbers", "tensors"))
    per_item = len(node.attributes["results"].as_ints())
    return index >= numbers and (index - numbers) // tensors == (new.index() or 0) // per_item


def _put_last(graph: ir.Graph, updates: Sequence[ir.Node], inside: Set[ir.Node], loss: ir.Value, names: Names) -> None:
    """Make all updates, with what is `inside` of them, depend on all other nodes."""
    ends = [
        next(value for value in node.outputs if value.name)
        for node in graph
        if node not in inside and all(use.node in inside for value in node.outputs for use in value.uses())
    ]
    ready = ir.Node(DOMAIN, "Ready", [loss, *ends], num_outputs=1, name=names.fresh("Ready"))
    ready.outputs[0].name = names.fresh("ready")
    ready.outputs[0].type, ready.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
    graph.remove(updates)
    graph.append(ready)
    graph.extend(updates)
    for node in filter(_is_update, inside):
        node.resize_inputs(len(node.inputs) + 1)
        node.replace_input_with(len(node.inputs) - 1, ready.outputs[0])
        node.attributes.add(ir.AttrInt64("guarded", 1))
