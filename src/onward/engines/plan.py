"""Execution plans of the interpreter: ordered calls, and nodes that are differentiated as a group."""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.constants import is_relu6, tensor_in
from onward.engines.framework import ONLY_ON_HOST, Function, keywords
from onward.engines.fusion import FusionMatch, matches
from onward.engines.operator_forms import array_of, newest_form
from onward.model.core import is_gradient, string, strings, visible
from onward.model.walk import ancestors, between, nested_nodes, read_by
from onward.standard import is_standard
from onward.transform.types import check_words


@dataclasses.dataclass
class OperatorCall:
    """A node as a call of a function of the table."""

    operator: str
    function: Function | None
    """The function with its attributes. None if the operator always runs on the host."""
    on_host: Function | None
    """The function for inputs that are all on the host."""
    inputs: Sequence[ir.Value | None]
    outputs: Sequence[ir.Value | None]
    graphs: dict[str, GraphPlan]
    described: str
    last_used: list[ir.Value] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Differentiation:
    """A `Gradient`, and the nodes between its variables and its result."""

    plan: GraphPlan
    variables: Sequence[ir.Value]
    points: Sequence[ir.Value]
    """Values at which the gradient is taken: usually the variables themselves."""
    y: ir.Value
    shared: Sequence[ir.Value]
    """Values of the nodes that other nodes read."""
    outputs: Sequence[ir.Value | None]
    substitutes: Mapping[ir.Value, ir.Value]
    """Captured value -> the value that is read instead."""
    last_used: list[ir.Value] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class FusedCall:
    """Nodes that a framework may compute as one operator."""

    match: FusionMatch
    plan: GraphPlan
    """Plan of the single nodes."""
    last_used: list[ir.Value] = dataclasses.field(default_factory=list)

    @property
    def outputs(self) -> list[ir.Value]:
        return [self.match.output]


Item = OperatorCall | Differentiation | FusedCall


@dataclasses.dataclass
class GraphPlan:
    """Plan of a graph, or of some nodes of it."""

    inputs: dict[str, ir.Value]
    outputs: list[ir.Value]
    constants: dict[ir.Value, np.ndarray]
    items: list[Item]
    captured: list[ir.Value]
    """Values that are read from the outer graph."""


def plan(
    graph: ir.Graph, functions: Mapping[str, Function], host: Mapping[str, Function], opset: int, fuses: Container[str]
) -> GraphPlan:
    """Return the plan of a graph whose operators are in `functions` or run on the host; `fuses` replace some nodes."""
    return _Planner(functions, host, opset, fuses).graph(graph)


class _Planner:
    def __init__(
        self, functions: Mapping[str, Function], host: Mapping[str, Function], opset: int, fuses: Container[str]
    ):
        self._functions = functions
        self._host = host
        self._opset = opset
        self._fuses = fuses
        self._scope: tuple[ir.Graph, ...] = ()
        self._values: dict[str, ir.Value] = {}
        self._variables: set[str] = set()
        """Names of the variables of all Gradient nodes."""

    def graph(self, graph: ir.Graph) -> GraphPlan:
        outside, self._scope = self._scope, (*self._scope, graph)
        self._variables.update(name for node in filter(is_gradient, graph) for name in strings(node, "xs"))
        outer, self._values = self._values, {**self._values, **visible([graph])}
        inputs = {value.name or "": value for value in graph.inputs if not value.is_initializer()}
        outputs = list(graph.outputs)
        constants = {
            value: array_of(tensor)
            for value in graph.initializers.values()
            if (tensor := value.const_value) is not None
        }
        plan = self._plan(list(graph), inputs.values(), outputs, constants)
        self._scope, self._values = outside, outer
        return dataclasses.replace(plan, inputs=inputs)

    def _plan(
        self,
        nodes: Sequence[ir.Node],
        inputs: Iterable[ir.Value],
        outputs: Iterable[ir.Value],
        constants: dict[ir.Value, np.ndarray],
        *,
        fuses: bool = True,
        overridden: Container[ir.Value] = (),
    ) -> GraphPlan:
        """Return the plan of some nodes of the current graph. They do not write overridden values."""
        outputs = list(outputs)
        items: list[Item] = []
        left = dict.fromkeys(nodes)
        for node in reversed(nodes):  # the derivative of a derivative comes last, and contains the other
            if node in left and is_gradient(node):
                del left[node]
                items.append(self._differentiation(node, left, outputs))
        for match in matches(list(left), set(outputs), self._fuses) if fuses else ():
            for node in match.nodes:
                del left[node]
            items.append(FusedCall(match, self._plan(match.nodes, (), [match.output], {}, fuses=False)))
        for node in left:
            if node.op_type == "Constant" and is_standard(node):
                tensor, (attribute,) = tensor_in(node), node.attributes.values()
                constants[node.outputs[0]] = (
                    array_of(tensor) if tensor is not None else np.array(attribute.value, object)
                )
            else:
                call = self._call(node, constants)
                call.outputs = [None if value in overridden else value for value in call.outputs]
                items.append(call)
        items = _needed_items(_sort_items(items), outputs)
        available = {*inputs, *constants, *(value for item in items for value in _values_written(item))}
        captured = dict.fromkeys(value for item in items for value in _read(item) if value not in available)
        captured.update(dict.fromkeys(value for value in outputs if value not in available))
        _mark_last_uses(items, {*outputs, *constants})
        return GraphPlan({}, outputs, constants, items, list(captured))

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _call(self, node: ir.Node, constants: dict[ir.Value, np.ndarray]) -> OperatorCall:
        operator, newest_inputs, attributes = newest_form(node, self._opset)
        inputs: list[ir.Value | None] = []
        for source in newest_inputs:
            if isinstance(source, np.ndarray):
                constants[value := ir.Value()] = source
                inputs.append(value)
            else:
                inputs.append(source)
        while inputs and inputs[-1] is None:
            inputs.pop()
        graphs = {
            name: self.graph(attribute.as_graph())
            for name, attribute in node.attributes.items()
            if attribute.type == ir.AttributeType.GRAPH
        }
        described = f"`{node.op_type}` (node `{node.name or (node.outputs[0].name if node.outputs else '')}`)"
        check_words(operator, attributes, described)
        outputs = [value if value.name else None for value in node.outputs]
        available = {name: value for name, value in attributes.items() if name not in graphs}
        available["outputs"] = len(outputs)
        available["is_relu6"] = (
            operator == "Clip"
            and len(inputs) > 2
            and is_relu6(*inputs[1:3])
            # ReLU6 has no derivatives by its bounds.
            and self._variables.isdisjoint(value.name for value in inputs[1:3] if value is not None)
        )
        return OperatorCall(
            operator,
            None if operator in ONLY_ON_HOST else _with(self._functions[operator], available),
            _with(self._host[operator], available) if operator in self._host else None,
            inputs,
            outputs,
            graphs,
            described,
        )

    # ---- derivatives -------------------------------------------------------------------------------------------------

    def _differentiation(
        self, node: ir.Node, left: dict[ir.Node, None], outputs: Sequence[ir.Value]
    ) -> Differentiation:
        """Plan a Gradient. Remove the nodes that it differentiates from `left`, so that they run
        once.

        The nodes stay, and run a second time for the Gradient, if it is taken at other values than
        its variables, if another Gradient has removed some of them, or if their inputs depend on
        them.
        """
        names, y = strings(node, "xs"), self._values[string(node, "y")]
        variables, points, nodes = self._path(node)
        at_variables = points == variables
        computed = {value for inner in nodes for value in inner.outputs}
        # Nodes cannot run as a group if other nodes compute their inputs from their outputs.
        is_group = ancestors(self._outside(nodes), reads=self._reads)[0].isdisjoint(nodes)
        shared: list[ir.Value] = []
        if at_variables and all(inner in left for inner in nodes) and computed.isdisjoint(variables) and is_group:
            for inner in nodes:
                del left[inner]
            read = {*outputs, *(value for other in left for value in self._reads(other))}
            for other in filter(is_gradient, left):  # may run some of these nodes a second time
                read |= self._outside(self._path(other)[2])
            shared = [value for inner in nodes for value in inner.outputs if value in read]
        return Differentiation(
            self._plan(nodes, variables[: len(names)], [y, *shared], {}, overridden=set(variables)),
            variables[: len(names)],
            points[: len(names)],
            y,
            shared,
            [value if value.name else None for value in node.outputs],
            {} if at_variables else dict(zip(variables[len(names) :], points[len(names) :], strict=True)),
        )

    def _path(self, node: ir.Node) -> tuple[list[ir.Value], list[ir.Value], list[ir.Node]]:
        """Return the variables of a Gradient, their values, and the nodes to its result."""
        names = strings(node, "xs")
        variables = [self._values[name] for name in (*names, *strings(node, "zs"))]
        points = [value for value in node.inputs if value is not None]
        sources = variables[: len(names)] if points == variables else variables
        y = self._values[string(node, "y")]
        return variables, points, between(y, sources, self._scope, known=set(variables), reads=self._reads)

    def _outside(self, nodes: Sequence[ir.Node]) -> set[ir.Value]:
        """Return the inputs of nodes that none of them computes."""
        return {value for node in nodes for value in self._reads(node)} - {v for node in nodes for v in node.outputs}

    def _reads(self, node: ir.Node) -> Iterator[ir.Value]:
        yield from read_by(node)
        for gradient in filter(is_gradient, (node, *nested_nodes(node))):  # reads its result by name
            if (y := string(gradient, "y")) in self._values:
                yield self._values[y]


def _with(function: Function, attributes: Mapping[str, Any]) -> Function:
    """Bind the attributes that a function takes."""
    bound = {name: attributes[name] for name in keywords(function) if name in attributes}
    return functools.partial(function, **bound) if bound else function


# ---- order -----------------------------------------------------------------------------------------------------------


def _read(item: Item) -> Iterator[ir.Value]:
    if isinstance(item, OperatorCall):
        yield from (value for value in item.inputs if value is not None)
        for nested in item.graphs.values():
            yield from nested.captured
    elif isinstance(item, FusedCall):
        yield from item.match.inputs
        yield from item.plan.captured
    else:
        yield from item.points
        yield from (item.substitutes.get(value, value) for value in item.plan.captured)


def _values_written(item: Item) -> Iterator[ir.Value]:
    yield from (value for value in item.outputs if value is not None)
    if isinstance(item, Differentiation):
        yield from item.shared


def _sort_items(items: Sequence[Item]) -> list[Item]:
    """Sort items so that values are written before they are read. Keep the order otherwise."""
    writer = {value: i for i, item in enumerate(items) for value in _values_written(item)}
    needs = [{writer[value] for value in _read(item) if value in writer} for item in items]
    readers: list[list[int]] = [[] for _ in items]
    for i, sources in enumerate(needs):
        for source in sources:
            readers[source].append(i)
    ready = [i for i, sources in enumerate(needs) if not sources]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(items[i])
        for reader in readers[i]:
            needs[reader].discard(i)
            if not needs[reader]:
                heapq.heappush(ready, reader)
    return order


def _needed_items(items: Sequence[Item], outputs: Iterable[ir.Value]) -> list[Item]:
    """Drop items whose results nothing reads: rewrites compute all outputs of an operator."""
    needed, result = set(outputs), []
    for item in reversed(items):
        if any(value in needed for value in _values_written(item)):
            needed.update(_read(item))
            result.append(item)
    return result[::-1]


def _mark_last_uses(items: Sequence[Item], needed: set[ir.Value]) -> None:
    """Set `last_used`, so that values are freed after their last use."""
    seen = set(needed)
    for item in reversed(items):
        for value in {*_read(item), *_values_written(item)}:
            if value not in seen:
                seen.add(value)
                item.last_used.append(value)
