"""Fused updates: the elementwise end of a step in a few nodes, one pass over memory.

Optimizers, clipping and averages are elementwise operators whose results nothing else reads. Those
of one parameter become a program, and parameters with equal programs share a node. A program runs
the same operators in the same order, so no optimizer needs a kernel of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import onnx_ir as ir

from onward.build import Names
from onward.kernels.library import DOMAIN
from onward.model import Model
from onward.shapes import dims
from onward.standard import is_standard
from onward.transform.context import Context

OPERATORS = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sqrt", "Neg", "Abs", "Sign", "Where")
"""Operators in the order of native/programs.h."""
ELEMENTWISE = "Elementwise"
_FEWEST = 1 << 20
"""Elements per node: a single node for all parameters would keep all gradients in memory."""


def fuse_updates(context: Context) -> None:
    """Let kernels compute the elementwise end of a step, in place, also in nested graphs."""
    for graph in (context.graph, *context.graph.subgraphs()):
        if _fuse(graph, context.names):
            context.graph.opset_imports[DOMAIN] = 1


def _fuse(graph: ir.Graph, names: Names) -> bool:
    ends = {value: i for i, value in enumerate(graph.outputs)}
    positions = {node: i for i, node in enumerate(graph)}
    programs = [_Program(nodes, ends) for nodes in _regions(graph) if len(nodes) > 1]
    for group in _groups(programs, positions):
        last = max((node for program in group for node in program.nodes), key=positions.__getitem__)
        _write(graph, last, group, names, ends)
    graph.remove([node for program in programs for node in program.nodes], safe=True)
    return bool(programs)


def _regions(graph: ir.Graph) -> Iterator[list[ir.Node]]:
    """Yield sets of elementwise nodes of one shape whose results only the same set reads."""
    region: dict[ir.Node, list[ir.Node]] = {}
    for node in reversed(graph):
        if not _is_elementwise(node):
            continue
        readers = [use.node for use in node.outputs[0].uses()]
        if not all(reader in region and _shape(reader) == _shape(node) for reader in readers):
            continue
        merged = [node]
        for nodes in {id(region[reader]): region[reader] for reader in readers}.values():
            merged += nodes
        region.update(dict.fromkeys(merged, merged))
    yield from {id(nodes): nodes for nodes in region.values()}.values()


def _shape(node: ir.Node) -> tuple[int, ...] | None:
    """Return the sizes of the first output, if all are known."""
    sizes = dims(node.outputs[0])
    numbers = tuple(n for n in sizes or () if isinstance(n, int))
    return numbers if sizes is not None and len(numbers) == len(sizes) else None


def _is_elementwise(node: ir.Node) -> bool:
    sizes = _shape(node)
    if node.op_type not in OPERATORS or not is_standard(node) or sizes is None or node.graph is None:
        return False
    if 0 in sizes:  # the tensors of an empty parameter have no data
        return False
    if node.outputs[0].dtype != ir.DataType.FLOAT:
        return False
    operands = node.inputs
    if node.op_type == "Where":
        if not _is_number(operands[0], sizes):
            return False
        operands = operands[1:]
    return 0 < len(operands) <= 2 and all(
        value is not None and value.dtype == ir.DataType.FLOAT and (_is_number(value, sizes) or dims(value) == sizes)
        for value in operands
    )


def _is_number(value: ir.Value | None, beside: Sequence[int]) -> bool:
    """True if a value has one element and does not change the shape that it broadcasts with."""
    sizes = dims(value)
    return sizes is not None and len(sizes) <= len(beside) and all(n == 1 for n in sizes) and math.prod(beside) != 1


class _Program:
    """The program of one region, independent of its parameter."""

    def __init__(self, nodes: list[ir.Node], ends: dict[ir.Value, int]):
        self.nodes = nodes
        members = set(nodes)
        self.results = sorted((node.outputs[0] for node in nodes if node.outputs[0] in ends), key=ends.__getitem__)
        sizes = _shape(nodes[0]) or ()
        self.size = math.prod(sizes)
        self.numbers: list[ir.Value] = []
        self.tensors: list[ir.Value] = []
        order: dict[ir.Value, int] = {}
        waiting = [(value, False) for value in reversed(self.results)]
        while waiting:  # operands precede their readers
            value, ready = waiting.pop()
            node = value.producer()
            if value in order or value in self.numbers or value in self.tensors:
                continue
            if node not in members:
                (self.numbers if _is_number(value, sizes) else self.tensors).append(value)
            elif ready:
                order[value] = len(order)
            else:
                waiting += [(value, True), *((v, False) for v in reversed(node.inputs) if v is not None)]
        registers = {value: i for i, value in enumerate((*self.numbers, *self.tensors, *order))}
        steps = []
        for value in order:
            node = value.producer()
            assert node is not None
            operands = [registers[operand] for operand in node.inputs if operand is not None]
            steps += [OPERATORS.index(node.op_type), *operands, *[operands[0]] * (3 - len(operands))]
        self.attributes = _Attributes(
            tuple(steps), tuple(registers[value] for value in self.results), len(self.numbers), len(self.tensors)
        )


class _Attributes(NamedTuple):
    program: tuple[int, ...]
    results: tuple[int, ...]
    numbers: int
    tensors: int


def _groups(programs: list[_Program], positions: dict[ir.Node, int]) -> Iterator[list[_Program]]:
    """Yield groups of equal programs with the same scalars, in the order of the graph."""
    open_groups: dict[object, list[_Program]] = {}
    for program in sorted(programs, key=lambda p: max(positions[node] for node in p.nodes)):
        key = (program.attributes, *program.numbers)
        group = open_groups.setdefault(key, [])
        group.append(program)
        if sum(p.size for p in group) >= _FEWEST:
            yield open_groups.pop(key)
    yield from open_groups.values()


def _write(graph: ir.Graph, last: ir.Node, programs: list[_Program], names: Names, ends: dict[ir.Value, int]) -> None:
    """Write one node for a group of programs."""
    attributes = programs[0].attributes
    numbers = []
    for value in programs[0].numbers:
        if value.dtype != ir.DataType.FLOAT:
            cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", ir.DataType.FLOAT.value)], name=names.fresh("Cast"))
            cast.outputs[0].name = names.fresh(f"{value.name}/number")
            last.append(cast)
            last, value = cast, cast.outputs[0]
        numbers.append(value)
    results = [value for program in programs for value in program.results]
    node = ir.node(
        ELEMENTWISE,
        [*numbers, *(value for program in programs for value in program.tensors)],
        attributes._asdict(),
        domain=DOMAIN,
        num_outputs=len(results),
        name=names.fresh(ELEMENTWISE),
    )
    last.append(node)
    for old, new in zip(results, node.outputs, strict=True):
        new.name, old.name = old.name, None
        new.type, new.shape = old.type, old.shape
        graph.outputs[ends[old]] = new


# ---- updates in place ------------------------------------------------------------------------------------------------
#
# A step writes state into the memory that it was read from, which saves a copy of all state. A node may write there
# when nothing else will read the old value. So all other nodes run first: `Ready` reads their last results, and all
# updates read `Ready`, since ONNX Runtime has no other way to order nodes. An update reads each block of a tensor
# before it writes it, and changes nothing if the loss is not finite.


def update_in_place(model: Model, update: Mapping[str, str], loss: str | None) -> set[str]:
    """Write state in place where that is safe; return its names. `update` maps state to new values."""
    graph = model.graph
    results = {value.name: value for value in graph.outputs}
    inputs = {value.name: value for value in graph.inputs}
    minimized = results.get(loss)
    if minimized is None or minimized.dtype != ir.DataType.FLOAT:
        return set()
    updates, inside = _updates(graph)
    in_place = {
        name
        for name, new in update.items()
        if name in inputs and new in results and _can_be_overwritten(inputs[name], results[new], inside)
    }
    if in_place:
        _order_last(graph, updates, inside, minimized, model.names())
    return in_place


def _updates(graph: ir.Graph) -> tuple[list[ir.Node], set[ir.Node]]:
    """Return the updates that only updates read, and these with the nodes of their branches."""
    updates: list[ir.Node] = []
    inside: set[ir.Node] = set()
    for node in reversed(graph):
        executed = set(_executed(node))
        if any(map(_is_update, executed)) and all(use.node in inside for value in node.outputs for use in value.uses()):
            updates.append(node)
            inside |= executed
    return updates[::-1], inside


def _executed(node: ir.Node) -> Iterator[ir.Node]:
    """Yield a node and all nodes in the branches of an If, which makes an update now and then."""
    yield node
    if node.op_type == "If":
        for branch in _branches(node):
            yield from branch.all_nodes()


def _branches(node: ir.Node) -> Iterator[ir.Graph]:
    return (attribute.as_graph() for attribute in node.attributes.values())


def _is_update(node: ir.Node) -> bool:
    return node.op_type == ELEMENTWISE and node.domain == DOMAIN


def _can_be_overwritten(state: ir.Value, new: ir.Value, updates: Set[ir.Node]) -> bool:
    """True if, of all updates, only its own reads a state, element by element."""
    node = new.producer()
    if node is None or node not in updates:
        return False
    ends = [new] if _is_update(node) else [branch.outputs[new.index() or 0] for branch in _branches(node)]
    readers = [use for use in state.uses() if use.node in updates]
    return len(readers) == len(ends) and all(any(_writes_over(*use, end) for use in readers) for end in ends)


def _writes_over(node: ir.Node, index: int, new: ir.Value) -> bool:
    """True if a node reads an input only for the same elements of `new`."""
    if node is not new.producer():
        return False
    if not _is_update(node):
        return node.op_type == "Identity"
    numbers, tensors = (node.attributes[name].as_int() for name in ("numbers", "tensors"))
    per_item = len(node.attributes["results"].as_ints())
    return index >= numbers and (index - numbers) // tensors == (new.index() or 0) // per_item


def _order_last(
    graph: ir.Graph, updates: Sequence[ir.Node], inside: Set[ir.Node], loss: ir.Value, names: Names
) -> None:
    """Make all updates, with the nodes `inside` of them, depend on all other nodes."""
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
