"""The blocks of a graph: layers of a transformer, stages of a network of residuals, whatever they are called.

A graph is cut into parts that follow one another, some of which are blocks. Blocks are known by what they compute, and
the numbers in the names of their parameters help where there are any (see spans.py). Those of one kind compute
the same from other parameters: node by node, parameter by parameter.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import onnx_ir as ir

from onward.analysis.spans import OperatorRow, Span, find_spans
from onward.constants import constant_tensor
from onward.model import Model
from onward.model.walk import captured_values, nested_graphs, read_by, source_of
from onward.recipe.trainable import judge
from onward.standard import IR_VERSION, operator_name

_SIZES = {"Shape", "Size"}
_HANDS_ON = {"Identity", "Cast", "CastLike"}
_LARGE = 4096
_ACTIVATIONS = {"Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "Relu", "Sigmoid", "Swish", "Tanh"}


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Nodes that can be computed at once, after those of the parts before it."""

    name: str
    """What the names of its parameters have in common, such as `encoder.layer.3`, or nothing."""
    kind: int | None
    """The same for blocks that are equal; None for what is no block."""
    nodes: list[ir.Node]
    initializers: list[ir.Value]
    """Those that no other part reads, parameters and constants, in the order in which they are read."""
    parameters: list[ir.Value]
    """Those of them that can be trained."""
    inputs: list[ir.Value]
    """What it reads of other parts and of the inputs of the graph, and initializers that others read too."""
    outputs: list[ir.Value]
    """What others read of it, and outputs of the graph."""


def find_blocks(model: Model) -> list[Part]:
    """The repeated blocks of an inference graph, in order; none, if it repeats nothing."""
    return [part for part in cut_into_parts(model) if part.kind is not None]


def cut_into_parts(model: Model, parameters: Iterable[str] | None = None) -> list[Part]:
    """The inference graph, cut into blocks and what is before, between and after them.

    Without their names, parameters are what looks like one.
    """
    if parameters is None:
        parameters = [choice.name for choice in judge(model, model.outputs) if choice.role == "parameter"]
    names = set(parameters)
    trunk = _Trunk(model.graph, names)
    spans = find_spans(trunk.row())
    places = _places(model.graph, trunk, spans)
    nodes: list[list[ir.Node]] = [[] for _ in range(2 * len(spans) + 1)]
    for node in model.graph:
        nodes[places[node]].append(node)
    readers = _readers(model.graph, places)
    kinds: dict[Hashable, int] = {}
    parts = []
    for place, found in enumerate(nodes):
        if found:
            part = _part(found, place, readers, names)
            kind = kinds.setdefault(_signature(part), len(kinds)) if place % 2 else None
            parts.append(dataclasses.replace(part, kind=kind))
    return parts


# ---- the row of operators that is cut --------------------------------------------------------------------------------


class _Trunk:
    """The nodes that compute with parameters what depends on inputs: not masks, tables of positions, or sizes."""

    def __init__(self, graph: ir.Graph, parameters: set[str]):
        self.nodes: list[ir.Node] = []
        self._paths: list[str] = []
        self._made: set[ir.Value] = set()
        given = set(graph.inputs) - set(graph.initializers.values())
        behind: dict[ir.Value, str] = {}
        """Of what is made of parameters alone: the name of the first."""
        for node in graph:
            read = list(read_by(node))[: 1 if node.op_type in _HANDS_ON else None]
            path = next((found for value in read if (found := _path(value, parameters, behind))), "")
            is_made = any(value in self._made for value in read)
            is_given = is_made or any(value in given for value in read)
            if node.op_type in _SIZES:
                given.update(node.outputs if is_given else ())
            elif is_made or (path and is_given):
                if node.op_type not in _HANDS_ON:
                    self.nodes.append(node)
                    self._paths.append(path)
                self._made.update(
                    value for value in node.outputs if (value.dtype is None or value.dtype.is_floating_point())
                )
            elif is_given:
                given.update(node.outputs)
            elif path:
                behind.update(dict.fromkeys(node.outputs, path))

    def row(self) -> OperatorRow:
        places = {node: i for i, node in enumerate(self.nodes)}
        words = [_word(node, path) for node, path in zip(self.nodes, self._paths, strict=True)]
        readers = Counter(self._paths)
        last: dict[ir.Node, int] = {}
        for at, node in enumerate(self.nodes):
            for value in read_by(node):
                source = source_of(value, _HANDS_ON)
                if source in self._made and (producer := source.producer()) in places and producer is not None:
                    last[producer] = at
        sizes = [tuple(_size(value) for value in read_by(node)) for node in self.nodes]
        return OperatorRow(
            words,
            details=list(zip(words, sizes, strict=True)),
            reads_parameters=list(map(bool, self._paths)),
            paths=[path if readers[path] == 1 else "" for path in self._paths],
            lives=[(places[node], at) for node, at in last.items()],
        )


def _path(value: ir.Value, parameters: set[str], behind: dict[ir.Value, str]) -> str:
    return value.name or "" if value.name in parameters else behind.get(value, "")


def _size(value: ir.Value) -> Hashable:
    tensor = constant_tensor(value)
    return None if tensor is None else tuple(tensor.shape)


def _word(node: ir.Node, path: str) -> Hashable:
    """What a node computes, whatever the sizes are."""
    width: Any = None
    if node.op_type == "Conv" and (weight := node.inputs[1]) is not None and weight.shape is not None:
        kernel = "point" if all(size == 1 for size in weight.shape[2:]) else "area"
        width = kernel, weight.shape[1] == 1
    name = operator_name(node)
    return "activation" if name in _ACTIVATIONS else name, bool(path), width


# ---- where nodes belong ----------------------------------------------------------------------------------------------


def _places(graph: ir.Graph, trunk: _Trunk, spans: Sequence[Span]) -> dict[ir.Node, int]:
    """The number of the part of each node: odd for blocks, even for what is before, between and after them.

    What is beside the trunk is computed where it is read, or, if several parts read it, as early as can be. What only
    hands on the result of a node, without others that read it, belongs to that.
    """
    fixed: dict[ir.Node, int] = {}
    starts = [*(start for start, _ in spans), len(trunk.nodes)]
    block = 0
    for at, node in enumerate(trunk.nodes):
        while at >= starts[block]:
            block += 1
        fixed[node] = 2 * block - (block > 0 and at < spans[block - 1].end)
    earliest: dict[ir.Node, int] = {}
    for node in graph:
        if (source := _only_source(node)) in fixed:
            fixed[node] = fixed[source]
        sources = (earliest[p] for value in read_by(node) if (p := value.producer()) in earliest and p is not None)
        earliest[node] = fixed.get(node, max(sources, default=0))
    places: dict[ir.Node, int] = {}
    wanted: dict[ir.Node, set[int]] = {}
    for node in reversed(graph):
        of_readers = wanted.get(node, set())
        place = fixed.get(node, next(iter(of_readers)) if len(of_readers) == 1 else earliest[node])
        places[node] = place
        for value in read_by(node):
            if (producer := value.producer()) is not None:
                wanted.setdefault(producer, set()).add(place)
    return places


def _only_source(node: ir.Node) -> ir.Node | None:
    """What makes the value that a node hands on in its place, since nobody else reads it."""
    value = node.inputs[0] if node.op_type in _HANDS_ON and node.inputs else None
    return value.producer() if value is not None and len(value.uses()) == 1 else None


def _readers(graph: ir.Graph, places: dict[ir.Node, int]) -> dict[ir.Value, set[int]]:
    """The numbers of the parts that read a value; -1 for who reads the outputs of the graph."""
    readers: dict[ir.Value, set[int]] = {value: {-1} for value in graph.outputs}
    for node, place in places.items():
        for value in read_by(node):
            readers.setdefault(value, set()).add(place)
    return readers


def _part(nodes: list[ir.Node], place: int, readers: dict[ir.Value, set[int]], parameters: set[str]) -> Part:
    outside = captured_values(nodes)
    own = [value for value in outside if value.is_initializer() and readers[value] == {place}]
    trained = [value for value in own if value.name in parameters]
    return Part(
        name=_common_name([value.name or "" for value in trained]),
        kind=None,
        nodes=nodes,
        initializers=own,
        parameters=trained,
        inputs=[value for value in outside if value not in set(own)],
        outputs=[value for node in nodes for value in node.outputs if readers.get(value, set()) - {place}],
    )


def _common_name(names: Iterable[str]) -> str:
    """What all names with dots have before one."""
    paths = [name.split(".")[:-1] for name in names if "." in name]
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in same)


# ---- what is equal ---------------------------------------------------------------------------------------------------


def _signature(part: Part) -> Hashable:
    """What a block computes, whatever its values are called and its parameters hold."""
    numbers: dict[ir.Value, int] = {}
    own = set(part.initializers)

    def seen(value: ir.Value | None) -> Hashable:
        tensor = None if value is None else constant_tensor(value)
        if value is None or (tensor is not None and not holds_numbers(tensor)):
            return None if tensor is None else _constant(tensor)
        size = (tensor.dtype, tuple(tensor.shape)) if tensor is not None else None
        return numbers.setdefault(value, len(numbers)), size, value in own

    nodes = []
    for node in part.nodes:
        attributes = tuple((name, _attribute(node, attribute)) for name, attribute in sorted(node.attributes.items()))
        made = tuple(numbers.setdefault(value, len(numbers)) for value in node.outputs)
        nodes.append((operator_name(node), tuple(map(seen, node.inputs)), attributes, made))
    return tuple(nodes), tuple(map(seen, part.outputs))


def holds_numbers(tensor: ir.TensorProtocol) -> bool:
    """Whether a constant may be other numbers in a block that is equal: floats that are more than a number."""
    return tensor.dtype.is_floating_point() and len(tensor.shape) > 0


def _constant(tensor: ir.TensorProtocol) -> Hashable:
    """What is the same of constants that are; large ones, such as quantised weights, are not read to know that."""
    return id(tensor) if tensor.size > _LARGE else (tensor.dtype, tuple(tensor.shape), tensor.tobytes())


def _attribute(node: ir.Node, attribute: ir.Attr) -> Hashable:
    if any(True for _ in nested_graphs(node)):
        return id(node)  # graphs inside are not compared
    value = attribute.value
    if isinstance(value, ir.TensorProtocol):
        return _constant(value)
    return tuple(value) if isinstance(value, list | tuple) else value


# ---- parts as models that are executed one after another -------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class PartInterface:
    """What a part of a graph reads and makes, by name."""

    name: str
    is_block: bool
    reads: list[str]
    """In the order of the inputs of the model that computes it."""
    makes: list[str]
    """For others, in the order of the outputs of the model."""
    own: list[str]
    """What is held and no other part reads."""
    last: list[str] = dataclasses.field(default_factory=list)
    """What nothing reads after it."""

    def hand_over(self, values: dict[str, Any], results: Iterable[Any]) -> None:
        """Put its results among the values at hand, and let go what nothing reads any more."""
        values.update(zip(self.makes, results, strict=True))
        for name in self.last:
            values.pop(name, None)


def models_of_parts(model: Model, parts: Iterable[Part], held: Collection[str]) -> list[tuple[PartInterface, Model]]:
    """The parts of a graph, and models that compute them, which those of one kind share.

    What is held is an input of the models; other initializers they have themselves.
    """
    models: dict[int, Model] = {}
    interfaces: list[tuple[PartInterface, Model]] = []
    for part in parts:
        given = [*part.inputs, *part.initializers]
        constants = [value for value in given if value.is_initializer() and value.name not in held]
        read = [value for value in given if value not in set(constants)]
        made = [value for value in part.outputs if value.name]
        inner = models.get(part.kind) if part.kind is not None else None
        if inner is None:
            inner = _model(model, part, read, made, constants)
        if part.kind is not None:
            models[part.kind] = inner
        own = [value.name or "" for value in part.initializers if value.name in held]
        names = [value.name or "" for value in read], [value.name or "" for value in made]
        interfaces.append((PartInterface(part.name, part.kind is not None, *names, own), inner))
    needed = {value.name or "" for value in model.outputs}
    for interface, _ in reversed(interfaces):
        interface.last.extend(
            name for name in dict.fromkeys((*interface.reads, *interface.makes)) if name not in needed
        )
        needed.update(interface.last)
    return interfaces


def _model(model: Model, part: Part, read: list[ir.Value], made: list[ir.Value], constants: list[ir.Value]) -> Model:
    imports = dict(model.ir.opset_imports)
    view = ir.GraphView(read, made, nodes=part.nodes, initializers=constants, opset_imports=imports)
    functions = [function.clone() for function in model.functions.values()]
    return Model(ir.Model(view.clone(), ir_version=model.ir.ir_version or IR_VERSION, functions=functions))
