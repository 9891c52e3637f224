"""Segments: a graph with AllReduces cut into models without, which run between the all-reduces.

AllReduces that do not depend on each other happen at the same time, such as those of all gradients.
In the same way, a graph with string inputs is cut behind the nodes that convert strings to integers.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from onward.errors import UnsupportedError
from onward.lowering.data_parallel import is_all_reduce, is_mean
from onward.model import Model
from onward.model.walk import ancestors, captured_values, nested_nodes, read_by
from onward.runtime.composite_sessions import Exchange


class Segment(NamedTuple):
    """A graph between two all-reduces."""

    model: Model
    exchanged: list[Exchange]
    """Values that are all-reduced after it."""


def cut(model: Model) -> list[Segment]:
    """Return the segments of a lowered model, in order. The model is consumed."""
    graph = model.graph
    available: dict[ir.Value, int] = {}
    """Value -> the segment after which it is available."""
    nodes: dict[ir.Node, int] = {}
    exchanged: list[list[Exchange]] = [[]]
    for node in graph:
        index = max((available.get(value, 0) for value in read_by(node)), default=0)
        if is_all_reduce(node):
            assert node.inputs[0] is not None
            exchanged += [[] for _ in range(len(exchanged), index + 2)]
            exchanged[index].append(Exchange(node.inputs[0].name or "", node.outputs[0].name or "", is_mean(node)))
            index += 1
        elif node.op_type != "Constant":
            nodes[node] = index
        available.update(dict.fromkeys(node.outputs, index))
    cutter = _Cutter(model, nodes)
    return [
        Segment(cutter.segment(index, [exchange.local for exchange in exchanges]), exchanges)
        for index, exchanges in enumerate(exchanged)
    ]


def cut_after_text(model: Model) -> tuple[Model, Model] | None:
    """Return the model that makes integers of strings, and the rest; the model is consumed."""
    graph = model.graph
    texts = {value for value in graph.inputs if value.dtype is ir.DataType.STRING}
    if not texts:
        return None
    others = {value for value in graph.inputs if value not in texts}
    of_text = set(texts)
    for node in graph:  # nodes that depend only on text and constants: those that read strings, or return no floats
        inputs = set(read_by(node))
        is_discrete = all(value.dtype is not None and not value.dtype.is_floating_point() for value in node.outputs)
        reads_strings = any(value.dtype is ir.DataType.STRING for value in inputs)
        if inputs & others or not (is_discrete or reads_strings):
            others.update(node.outputs)
        elif inputs & of_text:
            of_text.update(node.outputs)
    first, _ = ancestors(of_text)
    strings = {value for value in of_text if value.dtype is ir.DataType.STRING}
    for node in graph:
        if node not in first and not strings.isdisjoint(read_by(node)):
            raise UnsupportedError(
                f"`{node.name}` needs text and state, which ONNX Runtime cannot bind together",
                hint='use another engine: `engine="torch"` (`--engine torch`)',
            )
    for i, value in enumerate(graph.outputs):
        if value in of_text:  # outputs of the model are outputs of the rest
            identity = ir.node("Identity", [value])
            identity.outputs[0].type, identity.outputs[0].shape = value.type, value.shape
            value.name, identity.outputs[0].name = f"{value.name}/of_text", value.name
            graph.append(identity)
            graph.outputs[i] = identity.outputs[0]
    nodes = {node: int(node not in first) for node in graph if node.op_type != "Constant"}
    cutter = _Cutter(model, nodes)
    return cutter.segment(0, []), cutter.segment(1, [])


class _Cutter:
    def __init__(self, model: Model, nodes: dict[ir.Node, int]):
        self._model = model
        self._results = list(model.graph.outputs)
        self._owner = {inner: at for node, at in nodes.items() for inner in (node, *nested_nodes(node))}
        self._nodes = nodes
        self._by_name = {value.name: value for node in model.graph for value in node.outputs}
        model.graph.outputs.clear()

    def segment(self, index: int, local_names: list[str]) -> Model:
        nodes = [node for node, segment in self._nodes.items() if segment == index]
        computed = {value for node in nodes for value in node.outputs}
        outputs = [value for value in self._results if value in computed]
        outputs += [self._by_name[name] for name in local_names if self._by_name[name] in computed]
        outputs += [
            value for value in computed if any(self._owner.get(user, index) != index for user, _ in value.uses())
        ]
        self._model.graph.remove(nodes)
        imports = dict(self._model.graph.opset_imports)
        graph = ir.Graph([], list(dict.fromkeys(outputs)), nodes=nodes, opset_imports=imports, name=f"segment{index}")
        for value in captured_values(nodes):
            self._add_source(value, graph, index)
        return Model(ir.Model(graph, ir_version=self._model.ir.ir_version or 10))

    def _add_source(self, value: ir.Value, graph: ir.Graph, index: int) -> None:
        """Give a segment a value from elsewhere: a copy of a constant, or an input."""
        producer = value.producer()
        if producer is not None and producer.op_type == "Constant":
            constant = ir.Node("", "Constant", [], list(producer.attributes.values()), name=producer.name)
            copy = constant.outputs[0]
            graph.insert_before(graph[0], constant)
        else:
            copy = ir.Value()
        copy.name, copy.type, copy.shape = value.name, value.type, value.shape
        if producer is None and value.is_initializer():
            copy.const_value = value.const_value
            graph.register_initializer(copy)
        elif copy.producer() is None:
            graph.inputs.append(copy)
        for user, i in list(value.uses()):
            if self._owner.get(user) == index:
                user.replace_input_with(i, copy)
