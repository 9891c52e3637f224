"""What the interpreter does, worked out once per graph: calls in order, and what is differentiated as a whole."""

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
    """A node that is computed by a function of the table."""

    operator: str
    function: Function | None
    """With its attributes; None if the operator is always computed on the host."""
    on_host: Function | None
    """What computes it where all inputs are on the host."""
    inputs: Sequence[ir.Value | None]
    outputs: Sequence[ir.Value | None]
    graphs: dict[str, GraphPlan]
    described: str
    last_used: list[ir.Value] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Differentiation:
    """The nodes between the variables of a `Gradient` and its result, and the gradient itself."""

    plan: GraphPlan
    variables: Sequence[ir.Value]
    given: Sequence[ir.Value]
    """What the variables are; usually themselves."""
    y: ir.Value
    kept: Sequence[ir.Value]
    """What others read of what is computed on the way."""
    outputs: Sequence[ir.Value | None]
    others: Mapping[ir.Value, ir.Value]
    """Values that the nodes between read others in place of."""
    last_used: list[ir.Value] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class FusedCall:
    """Nodes that a framework may compute as one."""

    match: FusionMatch
    plan: GraphPlan
    """The nodes as they stand."""
    last_used: list[ir.Value] = dataclasses.field(default_factory=list)

    @property
    def outputs(self) -> list[ir.Value]:
        return [self.match.output]


Item = OperatorCall | Differentiation | FusedCall


@dataclasses.dataclass
class GraphPlan:
    """A graph, or a part of one."""

    inputs: dict[str, ir.Value]
    outputs: list[ir.Value]
    constants: dict[ir.Value, np.ndarray]
    items: list[Item]
    captured: list[ir.Value]
    """What is read from around it."""


def plan(
    graph: ir.Graph, functions: Mapping[str, Function], host: Mapping[str, Function], opset: int, fuses: Container[str]
) -> GraphPlan:
    """The plan of a whole graph, all operators of which are in `functions`, or are computed on the host.

    What amounts to one of the operators that are in `fuses` is handed to it.
    """
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
        self._known: dict[str, ir.Value] = {}
        self._variables: set[str] = set()
        """Names of what any Gradient differentiates by."""

    def graph(self, graph: ir.Graph) -> GraphPlan:
        outside, self._scope = self._scope, (*self._scope, graph)
        self._variables.update(name for node in filter(is_gradient, graph) for name in strings(node, "xs"))
        known, self._known = self._known, {**self._known, **visible([graph])}
        inputs = {value.name or "": value for value in graph.inputs if not value.is_initializer()}
        outputs = list(graph.outputs)
        constants = {
            value: array_of(tensor)
            for value in graph.initializers.values()
            if (tensor := value.const_value) is not None
        }
        made = self._part(list(graph), inputs.values(), outputs, constants)
        self._scope, self._known = outside, known
        return dataclasses.replace(made, inputs=inputs)

    def _part(
        self,
        nodes: Sequence[ir.Node],
        inputs: Iterable[ir.Value],
        outputs: Iterable[ir.Value],
        constants: dict[ir.Value, np.ndarray],
        *,
        fuses: bool = True,
        given: Container[ir.Value] = (),
    ) -> GraphPlan:
        """The plan of some nodes of the graph at hand; outputs of theirs that are given are not taken from them."""
        outputs = list(outputs)
        units: list[Item] = []
        left = dict.fromkeys(nodes)
        for node in reversed(nodes):  # the derivative of a derivative comes last, and contains the other
            if node in left and is_gradient(node):
                del left[node]
                units.append(self._differentiation(node, left, outputs))
        for match in matches(list(left), set(outputs), self._fuses) if fuses else ():
            for node in match.nodes:
                del left[node]
            units.append(FusedCall(match, self._part(match.nodes, (), [match.output], {}, fuses=False)))
        for node in left:
            if node.op_type == "Constant" and is_standard(node):
                constants[node.outputs[0]] = _constant(node)
            else:
                call = self._call(node, constants)
                call.outputs = [None if value in given else value for value in call.outputs]
                units.append(call)
        items = _needed_items(_sort_items(units), outputs)
        available = {*inputs, *constants, *(value for item in items for value in _values_written(item))}
        captured = dict.fromkeys(value for item in items for value in _read(item) if value not in available)
        captured.update(dict.fromkeys(value for value in outputs if value not in available))
        _mark_last_uses(items, {*outputs, *constants})
        return GraphPlan({}, outputs, constants, items, list(captured))

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _call(self, node: ir.Node, constants: dict[ir.Value, np.ndarray]) -> OperatorCall:
        operator, newest_inputs, attributes = newest_form(node, self._opset)
        inputs: list[ir.Value | None] = []
        for given in newest_inputs:
            if isinstance(given, np.ndarray):
                constants[value := ir.Value()] = given
                inputs.append(value)
            else:
                inputs.append(given)
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
            and self._variables.isdisjoint(
                value.name for value in inputs[1:3] if value is not None
            )  # not differentiated
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
        """A Gradient. The nodes that it differentiates are taken out of `left`, to be executed only once.

        If it is to be taken at other values than those of its variables, or another one has taken some of its nodes, or
        what they read depends on them, they are executed a second time for it, and stay.
        """
        names, y = strings(node, "xs"), self._known[string(node, "y")]
        variables, given, nodes = self._way(node)
        as_it_is = given == variables
        computed = {value for inner in nodes for value in inner.outputs}
        is_free = computed.isdisjoint(variables) and not self._read_their_results(nodes)
        kept: list[ir.Value] = []
        if as_it_is and all(inner in left for inner in nodes) and is_free:
            for inner in nodes:
                del left[inner]
            read = {*outputs, *(value for other in left for value in self._reads(other))}
            for other in filter(is_gradient, left):  # which may execute some of these nodes a second time
                read |= self._outside(self._way(other)[2])
            kept = [value for inner in nodes for value in inner.outputs if value in read]
        return Differentiation(
            self._part(nodes, variables[: len(names)], [y, *kept], {}, given=set(variables)),
            variables[: len(names)],
            given[: len(names)],
            y,
            kept,
            [value if value.name else None for value in node.outputs],
            {} if as_it_is else dict(zip(variables[len(names) :], given[len(names) :], strict=True)),
        )

    def _way(self, node: ir.Node) -> tuple[list[ir.Value], list[ir.Value], list[ir.Node]]:
        """The variables of a Gradient, what they are to be, and the nodes between them and its result."""
        names = strings(node, "xs")
        variables = [self._known[name] for name in (*names, *strings(node, "zs"))]
        given = [value for value in node.inputs if value is not None]
        sources = variables[: len(names)] if given == variables else variables
        return (
            variables,
            given,
            between(self._known[string(node, "y")], sources, self._scope, known=set(variables), reads=self._reads),
        )

    def _read_their_results(self, nodes: Sequence[ir.Node]) -> bool:
        """Whether nodes read, by way of others, what some of them compute: these cannot be executed as one."""
        return not ancestors(self._outside(nodes), reads=self._reads)[0].isdisjoint(nodes)

    def _outside(self, nodes: Sequence[ir.Node]) -> set[ir.Value]:
        """What nodes read that none of them computes."""
        return {value for node in nodes for value in self._reads(node)} - {v for node in nodes for v in node.outputs}

    def _reads(self, node: ir.Node) -> Iterator[ir.Value]:
        yield from read_by(node)
        for gradient in filter(is_gradient, (node, *nested_nodes(node))):  # which reads its result by name
            if (y := string(gradient, "y")) in self._known:
                yield self._known[y]


def _with(function: Function, attributes: Mapping[str, Any]) -> Function:
    """A function that has the attributes that it asks for."""
    asked = {name: attributes[name] for name in keywords(function) if name in attributes}
    return functools.partial(function, **asked) if asked else function


def _constant(node: ir.Node) -> np.ndarray:
    if (tensor := tensor_in(node)) is not None:
        return array_of(tensor)
    (attribute,) = node.attributes.values()
    return np.array(attribute.value, object)  # text


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
        yield from item.given
        yield from (item.others.get(value, value) for value in item.plan.captured)


def _values_written(item: Item) -> Iterator[ir.Value]:
    yield from (value for value in item.outputs if value is not None)
    if isinstance(item, Differentiation):
        yield from item.kept


def _sort_items(items: Sequence[Item]) -> list[Item]:
    """An order in which what is read has been written, as near to the given one as may be."""
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
    """Without those of which nothing is read: rewrites compute all outputs of an operator."""
    needed, kept = set(outputs), []
    for item in reversed(items):
        if any(value in needed for value in _values_written(item)):
            needed.update(_read(item))
            kept.append(item)
    return kept[::-1]


def _mark_last_uses(items: Sequence[Item], needed: set[ir.Value]) -> None:
    """Let values go when nothing reads them any more."""
    seen = set(needed)
    for item in reversed(items):
        for value in {*_read(item), *_values_written(item)}:
            if value not in seen:
                seen.add(value)
                item.last_used.append(value)
