"""Repeated blocks of a graph, such as the layers of a transformer or the stages of a ResNet.

A graph is cut into consecutive parts, some of which are blocks. Blocks are recognized by their
operators; numbers in the names of parameters help (see spans.py). Blocks of one pattern compute the
same from other parameters: node by node, parameter by parameter.
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


@dataclasses.dataclass(eq=False)
class Part:
    """Nodes that can be computed together, after those of the parts before it."""

    name: str
    """The common prefix of the names of its parameters, such as `encoder.layer.3`; may be empty."""
    pattern: int | None
    """Equal for blocks that compute the same; None between blocks."""
    nodes: list[ir.Node]
    initializers: list[ir.Value]
    """Parameters and constants that no other part reads, in the order in which they are read."""
    parameters: list[ir.Value]
    """The trainable ones among them."""
    inputs: list[ir.Value]
    """Values of other parts, inputs of the graph, and initializers that other parts read too."""
    outputs: list[ir.Value]
    """Values that other parts read, and outputs of the graph."""


def find_blocks(model: Model) -> list[Part]:
    """Return the repeated blocks of an inference graph, in order; empty if it repeats nothing."""
    return [block for block in cut_into_parts(model) if block.pattern is not None]


def cut_into_parts(model: Model, parameters: Iterable[str] | None = None) -> list[Part]:
    """Cut the inference graph into blocks and the nodes before, between and after them.

    `parameters` are their names (default: initializers that look trainable).
    """
    if parameters is None:
        parameters = [choice.name for choice in judge(model, model.outputs) if choice.role == "parameter"]
    names = set(parameters)
    trunk = _Trunk(model.graph, names)
    spans = find_spans(trunk.row())
    part_indices = _part_indices(model.graph, trunk, spans)
    nodes: list[list[ir.Node]] = [[] for _ in range(2 * len(spans) + 1)]
    for node in model.graph:
        nodes[part_indices[node]].append(node)
    readers = _readers(model.graph, part_indices)
    patterns: dict[Hashable, int] = {}
    parts = []
    for index, part_nodes in enumerate(nodes):
        if part_nodes:
            subgraph = _part(part_nodes, index, readers, names)
            if index % 2:
                subgraph.pattern = patterns.setdefault(_signature(subgraph), len(patterns))
            parts.append(subgraph)
    return parts


# ---- the row of operators that is cut --------------------------------------------------------------------------------


class _Trunk:
    """The nodes that compute with parameters on input data, without masks and position tables."""

    def __init__(self, graph: ir.Graph, parameters: set[str]):
        self.nodes: list[ir.Node] = []
        self._paths: list[str] = []
        self._computed: set[ir.Value] = set()
        from_inputs = set(graph.inputs) - set(graph.initializers.values())
        paths = {value: value.name or "" for value in graph.initializers.values() if value.name in parameters}
        """Parameters, and values computed from them alone -> the name of the first parameter."""
        for node in graph:
            inputs = list(read_by(node))[: 1 if node.op_type in _HANDS_ON else None]
            path = next((paths[value] for value in inputs if value in paths), "")
            reads_trunk = any(value in self._computed for value in inputs)
            reads_inputs = reads_trunk or any(value in from_inputs for value in inputs)
            if node.op_type in _SIZES:
                from_inputs.update(node.outputs if reads_inputs else ())
            elif reads_trunk or (path and reads_inputs):
                if node.op_type not in _HANDS_ON:
                    self.nodes.append(node)
                    self._paths.append(path)
                self._computed.update(
                    value for value in node.outputs if (value.dtype is None or value.dtype.is_floating_point())
                )
            elif reads_inputs:
                from_inputs.update(node.outputs)
            elif path:
                paths.update(dict.fromkeys(node.outputs, path))

    def row(self) -> OperatorRow:
        indices = {node: i for i, node in enumerate(self.nodes)}
        words = [_word(node, path) for node, path in zip(self.nodes, self._paths, strict=True)]
        readers = Counter(self._paths)
        last_reader: dict[ir.Node, int] = {}
        for at, node in enumerate(self.nodes):
            for value in read_by(node):
                source = source_of(value, _HANDS_ON)
                if source in self._computed and (producer := source.producer()) in indices and producer is not None:
                    last_reader[producer] = at
        sizes = [tuple(_size(value) for value in read_by(node)) for node in self.nodes]
        return OperatorRow(
            words,
            details=list(zip(words, sizes, strict=True)),
            reads_parameters=list(map(bool, self._paths)),
            paths=[path if readers[path] == 1 else "" for path in self._paths],
            lives=[(indices[node], at) for node, at in last_reader.items()],
        )


def _size(value: ir.Value) -> Hashable:
    tensor = constant_tensor(value)
    return None if tensor is None else tuple(tensor.shape)


def _word(node: ir.Node, path: str) -> Hashable:
    """Return a key of the computation of a node, independent of sizes."""
    width: Any = None
    if node.op_type == "Conv" and (weight := node.inputs[1]) is not None and weight.shape is not None:
        kernel = "point" if all(size == 1 for size in weight.shape[2:]) else "area"
        width = kernel, weight.shape[1] == 1
    name = operator_name(node)
    return "activation" if name in _ACTIVATIONS else name, bool(path), width


# ---- where nodes belong ----------------------------------------------------------------------------------------------


def _part_indices(graph: ir.Graph, trunk: _Trunk, spans: Sequence[Span]) -> dict[ir.Node, int]:
    """Return the index of the part of each node: odd for blocks, even for the other parts.

    A node beside the trunk belongs to the part that reads it, or to the earliest possible part if
    several do. An Identity or Cast that is the only reader of a value belongs to that value's part.
    """
    fixed: dict[ir.Node, int] = {}
    starts = [*(start for start, _ in spans), len(trunk.nodes)]
    block = 0
    for i, node in enumerate(trunk.nodes):
        while i >= starts[block]:
            block += 1
        fixed[node] = 2 * block - (block > 0 and i < spans[block - 1].end)
    earliest: dict[ir.Node, int] = {}
    for node in graph:
        if (source := _sole_source(node)) in fixed:
            fixed[node] = fixed[source]
        sources = (earliest[p] for value in read_by(node) if (p := value.producer()) in earliest and p is not None)
        earliest[node] = fixed.get(node, max(sources, default=0))
    part_indices: dict[ir.Node, int] = {}
    reader_parts: dict[ir.Node, set[int]] = {}
    for node in reversed(graph):
        own_readers = reader_parts.get(node, set())
        index = fixed.get(node, next(iter(own_readers)) if len(own_readers) == 1 else earliest[node])
        part_indices[node] = index
        for value in read_by(node):
            if (producer := value.producer()) is not None:
                reader_parts.setdefault(producer, set()).add(index)
    return part_indices


def _sole_source(node: ir.Node) -> ir.Node | None:
    """Return the producer of the value that the node passes on, if the node is its only reader."""
    value = node.inputs[0] if node.op_type in _HANDS_ON and node.inputs else None
    return value.producer() if value is not None and len(value.uses()) == 1 else None


def _readers(graph: ir.Graph, part_indices: dict[ir.Node, int]) -> dict[ir.Value, set[int]]:
    """Return the indices of the parts that read each value; -1 stands for the outputs of the graph."""
    readers: dict[ir.Value, set[int]] = {value: {-1} for value in graph.outputs}
    for node, index in part_indices.items():
        for value in read_by(node):
            readers.setdefault(value, set()).add(index)
    return readers


def _part(nodes: list[ir.Node], index: int, readers: dict[ir.Value, set[int]], parameters: set[str]) -> Part:
    outside = captured_values(nodes)
    initializers = [value for value in outside if value.is_initializer() and readers[value] == {index}]
    parameters_read = [value for value in initializers if value.name in parameters]
    return Part(
        name=_common_name([value.name or "" for value in parameters_read]),
        pattern=None,
        nodes=nodes,
        initializers=initializers,
        parameters=parameters_read,
        inputs=[value for value in outside if value not in set(initializers)],
        outputs=[value for node in nodes for value in node.outputs if readers.get(value, set()) - {index}],
    )


def _common_name(names: Iterable[str]) -> str:
    """Return the common prefix of all dotted names, without their last component."""
    paths = [name.split(".")[:-1] for name in names if "." in name]
    common = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in common)


# ---- what is equal ---------------------------------------------------------------------------------------------------


def _signature(part: Part) -> Hashable:
    """Return a key that is equal for blocks that compute the same; names and weights do not count."""
    numbers: dict[ir.Value, int] = {}
    initializers = set(part.initializers)

    def key_of(value: ir.Value | None) -> Hashable:
        tensor = None if value is None else constant_tensor(value)
        if value is None or (tensor is not None and not holds_numbers(tensor)):
            return None if tensor is None else _constant(tensor)
        size = (tensor.dtype, tuple(tensor.shape)) if tensor is not None else None
        return numbers.setdefault(value, len(numbers)), size, value in initializers

    nodes = []
    for node in part.nodes:
        attributes = tuple((name, _attribute(node, attribute)) for name, attribute in sorted(node.attributes.items()))
        outputs = tuple(numbers.setdefault(value, len(numbers)) for value in node.outputs)
        nodes.append((operator_name(node), tuple(map(key_of, node.inputs)), attributes, outputs))
    return tuple(nodes), tuple(map(key_of, part.outputs))


def holds_numbers(tensor: ir.TensorProtocol) -> bool:
    """True if equal blocks may differ in a constant: a floating-point tensor, not a scalar."""
    return tensor.dtype.is_floating_point() and len(tensor.shape) > 0


def _constant(tensor: ir.TensorProtocol) -> Hashable:
    """Return a key of a constant. Large ones, such as quantized weights, are compared by identity."""
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
    """Names of the values that a part of a graph reads and computes."""

    name: str
    is_block: bool
    reads: list[str]
    """In the order of the inputs of its model."""
    makes: list[str]
    """In the order of the outputs of its model."""
    own: list[str]
    """Parameters that no other part reads."""
    last: list[str] = dataclasses.field(default_factory=list)
    """Values that nothing reads after this part."""

    def hand_over(self, values: dict[str, Any], results: Iterable[Any]) -> None:
        """Add its results to the values, and drop the values that nothing reads later."""
        values.update(zip(self.makes, results, strict=True))
        for name in self.last:
            values.pop(name, None)


def models_of_parts(model: Model, parts: Iterable[Part], held: Collection[str]) -> list[tuple[PartInterface, Model]]:
    """Return the interface and a model of each part; blocks of one pattern share a model.

    Initializers named in `held` are inputs of the models; the models contain the others.
    """
    models: dict[int, Model] = {}
    interfaces: list[tuple[PartInterface, Model]] = []
    for subgraph in parts:
        sources = [*subgraph.inputs, *subgraph.initializers]
        constants = [value for value in sources if value.is_initializer() and value.name not in held]
        inputs = [value for value in sources if value not in set(constants)]
        outputs = [value for value in subgraph.outputs if value.name]
        inner = models.get(subgraph.pattern) if subgraph.pattern is not None else None
        if inner is None:
            inner = _model_of_part(model, subgraph, inputs, outputs, constants)
        if subgraph.pattern is not None:
            models[subgraph.pattern] = inner
        own_parameters = [value.name or "" for value in subgraph.initializers if value.name in held]
        names = [value.name or "" for value in inputs], [value.name or "" for value in outputs]
        interfaces.append((PartInterface(subgraph.name, subgraph.pattern is not None, *names, own_parameters), inner))
    needed_later = {value.name or "" for value in model.outputs}
    for interface, _ in reversed(interfaces):
        interface.last.extend(
            name for name in dict.fromkeys((*interface.reads, *interface.makes)) if name not in needed_later
        )
        needed_later.update(interface.last)
    return interfaces


def _model_of_part(
    model: Model, part: Part, inputs: list[ir.Value], outputs: list[ir.Value], constants: list[ir.Value]
) -> Model:
    imports = dict(model.ir.opset_imports)
    view = ir.GraphView(inputs, outputs, nodes=part.nodes, initializers=constants, opset_imports=imports)
    functions = [function.clone() for function in model.functions.values()]
    return Model(ir.Model(view.clone(), ir_version=model.ir.ir_version or IR_VERSION, functions=functions))
