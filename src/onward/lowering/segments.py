"""A graph with AllReduces as several without: what can be computed before the first of them, before the next ...

AllReduces that need nothing of each other happen at the same time, such as those of all gradients. In the same way a
graph that takes text is cut where numbers are made of it.
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
    """A graph between two exchanges."""

    model: Model
    exchanged: list[Exchange]
    """What all processes tell each other after it."""


def cut(model: Model) -> list[Segment]:
    """The segments of a lowered model, in their order. The model is taken apart: it must be the caller's own."""
    graph = model.graph
    when: dict[ir.Value, int] = {}
    """In which segment a value is known."""
    nodes: dict[ir.Node, int] = {}
    exchanged: list[list[Exchange]] = [[]]
    for node in graph:
        at = max((when.get(value, 0) for value in read_by(node)), default=0)
        if is_all_reduce(node):
            assert node.inputs[0] is not None
            exchanged += [[] for _ in range(len(exchanged), at + 2)]
            exchanged[at].append(Exchange(node.inputs[0].name or "", node.outputs[0].name or "", is_mean(node)))
            at += 1
        elif node.op_type != "Constant":
            nodes[node] = at
        when.update(dict.fromkeys(node.outputs, at))
    cutter = _Cutter(model, nodes)
    return [Segment(cutter.segment(at, [one.local for one in all]), all) for at, all in enumerate(exchanged)]


def cut_after_text(model: Model) -> tuple[Model, Model] | None:
    """What makes whole numbers of text, and the rest; None where no input is text. The model is taken apart."""
    graph = model.graph
    texts = {value for value in graph.inputs if value.dtype is ir.DataType.STRING}
    if not texts:
        return None
    others = {value for value in graph.inputs if value not in texts}
    of_text = set(texts)
    for node in graph:  # what depends on text and on constants, and is not yet what layers compute with
        read = set(read_by(node))
        is_discrete = all(value.dtype is not None and not value.dtype.is_floating_point() for value in node.outputs)
        if read & others or not is_discrete:
            others.update(node.outputs)
        elif read & of_text:
            of_text.update(node.outputs)
    first, _ = ancestors(of_text)
    words = {value for value in of_text if value.dtype is ir.DataType.STRING}
    for node in graph:
        if node not in first and not words.isdisjoint(read_by(node)):
            raise UnsupportedError(
                f"ONNX Runtime takes no text beside state in its own memory, and `{node.name}` needs both",
                hint='take another engine: `engine="torch"` (`--engine torch`)',
            )
    for i, value in enumerate(graph.outputs):
        if value in of_text:  # the rest hands on what the model puts out
            handed = ir.node("Identity", [value])
            handed.outputs[0].type, handed.outputs[0].shape = value.type, value.shape
            value.name, handed.outputs[0].name = f"{value.name}/of_text", value.name
            graph.append(handed)
            graph.outputs[i] = handed.outputs[0]
    nodes = {node: int(node not in first) for node in graph if node.op_type != "Constant"}
    cutter = _Cutter(model, nodes)
    return cutter.segment(0, []), cutter.segment(1, [])


class _Cutter:
    def __init__(self, model: Model, nodes: dict[ir.Node, int]):
        self._model = model
        self._results = list(model.graph.outputs)
        self._owner = {inner: at for node, at in nodes.items() for inner in (node, *nested_nodes(node))}
        self._nodes = nodes
        self._known = {value.name: value for node in model.graph for value in node.outputs}
        model.graph.outputs.clear()

    def segment(self, at: int, exchanged: list[str]) -> Model:
        nodes = [node for node, segment in self._nodes.items() if segment == at]
        made = {value for node in nodes for value in node.outputs}
        outputs = [value for value in self._results if value in made]
        outputs += [self._known[name] for name in exchanged if self._known[name] in made]
        outputs += [value for value in made if any(self._owner.get(user, at) != at for user, _ in value.uses())]
        self._model.graph.remove(nodes)
        imports = dict(self._model.graph.opset_imports)
        graph = ir.Graph([], list(dict.fromkeys(outputs)), nodes=nodes, opset_imports=imports, name=f"segment{at}")
        for value in captured_values(nodes):
            self._bring(value, graph, at)
        return Model(ir.Model(graph, ir_version=self._model.ir.ir_version or 10))

    def _bring(self, value: ir.Value, graph: ir.Graph, at: int) -> None:
        """Give a segment what it reads from elsewhere: a constant of its own, or an input."""
        producer = value.producer()
        if producer is not None and producer.op_type == "Constant":
            twin = ir.Node("", "Constant", [], list(producer.attributes.values()), name=producer.name)
            own = twin.outputs[0]
            graph.insert_before(graph[0], twin)
        else:
            own = ir.Value()
        own.name, own.type, own.shape = value.name, value.type, value.shape
        if producer is None and value.is_initializer():
            own.const_value = value.const_value
            graph.register_initializer(own)
        elif own.producer() is None:
            graph.inputs.append(own)
        for user, i in list(value.uses()):
            if self._owner.get(user) == at:
                user.replace_input_with(i, own)
