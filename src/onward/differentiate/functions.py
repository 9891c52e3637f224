"""Gradients of functions that stay functions: each is differentiated once for every kind of call.

A call `y = f(x)` becomes `y, kept... = f_forward(x)`, where `kept` is what the way back reads of what happens inside,
and its gradient is `dx = f_backward(x, y, kept..., dy)`. Two calls are of a kind if types, shapes and small constants
among their inputs are the same, their attributes, the inputs that need a gradient and the outputs that have one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from onward.build import Builder, Expr, Names
from onward.constants import constant_ints
from onward.differentiate.expand import expand
from onward.differentiate.simplify import tidy
from onward.differentiate.sweep import pull_back, way
from onward.errors import UnsupportedError
from onward.model import Model
from onward.model.core import values
from onward.model.walk import nested_nodes, nodes_after, read_by
from onward.rules import NoGradient, Rewrite, Rule
from onward.rules.registry import lookup
from onward.shapes import content_type
from onward.standard import IR_VERSION, STANDARD
from onward.transform.context import Context
from onward.transform.training import drop_unused_definitions


@dataclasses.dataclass(frozen=True)
class _Halves:
    """A function that was differentiated."""

    forward: str
    backward: str
    kept: tuple[tuple[str, ir.TypeProtocol | None], ...]
    """What the first half puts out after the outputs of the function."""
    read: tuple[int, ...]
    """What the second half reads, by positions among the inputs, the outputs and what is kept; then come gradients."""
    gradients: dict[int, ir.TypeProtocol | None]
    """What the second half puts out, by the position of the input that it is the gradient of."""


class FunctionRules:
    """Finds rules as the table does, and has one for calls of the functions of a model, to which it adds."""

    def __init__(self, model: Model):
        self._functions = model.functions
        self._imports = model.graph.opset_imports
        self._ir_version = model.ir.ir_version
        self._opset = model.opset
        self._names = Names(name for _, name, _ in model.functions)
        self._halves: dict[tuple[object, ...], _Halves | None] = {}
        self._contents: dict[tuple[object, ...], str] = {}

    def __call__(self, node: ir.Node) -> Rule | Rewrite | NoGradient | None:
        known = lookup(node)
        if known is not None or node.op_identifier() not in self._functions:
            return known
        keywords = {"node": None, "wanted": None}
        return Rule((node.domain, node.op_type), self._gradient, keywords=keywords, many=True)

    def _gradient(
        self, op: Builder, dys: Sequence[Expr | None], *inputs: Expr | None, node: ir.Node, wanted: Sequence[int]
    ) -> list[Expr | None]:
        """Have the call put out what the way back reads, and call the second half."""
        given = [i for i, dy in enumerate(dys) if dy is not None]
        halves = self._of_kind(node, wanted, given)
        found: list[Expr | None] = [None] * len(inputs)
        if halves is None:
            return found
        seen = [*inputs, *map(op, _call_forward(op, node, halves))]
        read = [*(seen[i] for i in halves.read), *(dys[i] for i in given)]
        results = op.node(node.domain, halves.backward, *read, outputs=len(halves.gradients))
        results = results if isinstance(results, tuple) else (results,)
        for result, (i, kind) in zip(results, halves.gradients.items(), strict=True):
            result.value.type = kind
            found[i] = result
        return found

    def _of_kind(self, node: ir.Node, wanted: Sequence[int], given: Sequence[int]) -> _Halves | None:
        attributes = (ir.serde.serialize_attribute(attribute) for attribute in node.attributes.values())
        kind = (
            node.op_identifier(),
            _signature_key(node.inputs),
            tuple(sorted(attribute.SerializeToString(deterministic=True) for attribute in attributes)),
            len(node.outputs),
            tuple(wanted),
            tuple(given),
        )
        if kind not in self._halves:
            try:
                self._halves[kind] = self._differentiated(node, wanted, given)
            except UnsupportedError as error:
                raise UnsupportedError(f"{error.message}\nin the function `{node.op_type}`", hint=error.hint) from error
        return self._halves[kind]

    def _differentiated(self, node: ir.Node, wanted: Sequence[int], given: Sequence[int]) -> _Halves | None:
        """The two halves for calls like this one; None if no gradient flows through it."""
        model, formals = self._body(node)
        context = Context(model)
        for i in given:
            output = context.graph.outputs[i].name or ""
            expand(context, output, [formals[x] for x in wanted], keep_functions=True)
        model = context.model
        known = {value.name: value for value in values(model.graph)}
        context.fill_in_types(known.values())
        inputs = [known[name] if name in known else ir.Value(name=name) for name in formals]
        graph, last, outputs = model.graph, model.graph[-1], list(model.graph.outputs)

        names = context.names
        names.take(formals)
        op = Builder(
            graph, opset=self._opset, names=names, functions=self._functions, imports=self._imports, share=True
        )
        sources = [inputs[i] for i in wanted]
        on_the_way = {inner for i in given for inner in way(outputs[i], sources, self)}
        dys = {
            y: ir.Value(name=names.fresh(f"d{y.name}"), type=content_type(y), shape=y.shape)
            for y in (outputs[i] for i in given)
        }
        seeds = {output: op(dy) for output, dy in dys.items()}
        found = pull_back(op, [inner for inner in graph if inner in on_the_way], seeds, sources, find=self)
        if not found:
            return None

        backward, read = split_off(op, last, list(dys.values()), found, [*inputs, *outputs])
        kept = [value for value in read if value not in inputs and value not in outputs]
        graph.initializers.clear()
        graph.inputs.clear()
        graph.inputs.extend(inputs)
        graph.outputs.extend(kept)
        seen = [*inputs, *outputs, *kept]
        return _Halves(
            kept=tuple((value.name or "", value.type) for value in kept),
            read=tuple(seen.index(value) for value in read),
            gradients={inputs.index(x): gradient.value.type for x, gradient in found.items()},
            forward=self._written(graph, node, "forward", "with what its gradient needs"),
            backward=self._written(backward, node, "backward", "on the way back"),
        )

    def _body(self, node: ir.Node) -> tuple[Model, list[str]]:
        """A model of what happens inside a call; and what the inputs of the call are called there.

        Small constants among the inputs are constants in the model, which rules and the inference of shapes may look
        at. An input that the call leaves out has a name, but is not there.
        """
        function = self._functions[node.op_identifier()]
        inputs = [_input(value, formal) for value, formal in zip(node.inputs, function.inputs, strict=False)]
        attributes = list(node.attributes.values())
        call = ir.Node(
            node.domain, node.op_type, inputs, attributes, overload=node.overload, num_outputs=len(function.outputs)
        )
        for output, formal in zip(call.outputs, function.outputs, strict=True):
            output.name = formal.name
        there = [value for value in inputs if value is not None]
        graph = ir.Graph(
            [value for value in there if value.const_value is None],
            call.outputs[: len(node.outputs)],
            nodes=[call],
            initializers=[value for value in there if value.const_value is not None],
            opset_imports=dict(self._imports),
            name=function.name,
        )
        InlinePass()(ir.Model(graph, ir_version=self._ir_version or IR_VERSION, functions=[function]))
        for inner, written in zip(graph.all_nodes(), function.all_nodes(), strict=True):
            inner.name = written.name  # the pass gives all of them names, such as node_7
        model = Model(ir.Model(graph, ir_version=self._ir_version or IR_VERSION, functions=[*self._functions.values()]))
        drop_unused_definitions(model)
        return model, [formal.name or "" for formal in function.inputs][: len(inputs)]

    def _written(self, graph: ir.Graph, node: ir.Node, half: str, meaning: str) -> str:
        """The name of a function with this graph: a new one, unless another kind of call has led to the same."""
        for value in values(graph):  # it serves all calls of a kind, and symbols of one mean nothing to another
            value.type = value.shape = None
        graph.name = None
        domains = {inner.domain for inner in graph.all_nodes()} & self._imports.keys() - {*STANDARD}
        graph.opset_imports.clear()
        graph.opset_imports.update({"": self._opset} | {domain: self._imports[domain] for domain in sorted(domains)})
        function = ir.Function(node.domain, "", graph=graph, attributes=[])
        content = ir.serde.serialize_function(function).SerializeToString(deterministic=True)
        key = (node.op_identifier(), half, content)
        if key not in self._contents:
            function.name = self._names.fresh(f"{node.op_type}_{half}")
            function.doc_string = f"{node.op_type}, {meaning}."
            self._contents[key] = function.name
            self._functions[function.identifier()] = function
        return self._contents[key]


# ---- calls -----------------------------------------------------------------------------------------------------------


def _signature_key(inputs: Iterable[ir.Value | None]) -> tuple[object, ...]:
    """What gradients of functions depend on. Of symbols among the sizes it only matters which are the same."""
    symbols: dict[object, str] = {}

    def size(n: int | ir.SymbolicDim) -> int | str | None:
        if isinstance(n, int) or n.value is None:
            return n if isinstance(n, int) else None
        return symbols.setdefault(n.value, f"size{len(symbols)}")

    return tuple(
        None
        if value is None
        else (str(value.type), None if value.shape is None else tuple(map(size, value.shape)), constant_ints(value))
        for value in inputs
    )


def _input(value: ir.Value | None, formal: ir.Value) -> ir.Value | None:
    """What a call reads, as the function sees it."""
    if value is None:
        return None
    inside = ir.Value(name=formal.name, type=value.type, shape=value.shape)
    numbers = constant_ints(value)
    if numbers is not None and value.dtype is not None and value.shape is not None and value.shape.is_static():
        array = np.array(numbers, value.dtype.numpy()).reshape(value.shape.numpy())
        inside.const_value = ir.Tensor(array, dtype=value.dtype, name=formal.name)
    return inside


def _call_forward(op: Builder, node: ir.Node, halves: _Halves) -> list[ir.Value]:
    """Have a node call the first half in the place of the function; its outputs."""
    count, label = len(node.outputs), node.name or node.op_type
    node.op_type, node.overload = halves.forward, ""
    node.attributes.clear()
    node.resize_outputs(count + len(halves.kept))
    for output, (name, kind) in zip(node.outputs[count:], halves.kept, strict=True):
        output.name, output.type = op.names.fresh(f"{label}/{name}"), kind
    for output in node.outputs[:count]:  # ONNX Runtime takes none that is left out before another
        output.name = output.name or op.names.fresh(f"{label}/unused")
    return list(node.outputs)


# ---- cutting the backward pass off -----------------------------------------------------------------------------------


def split_off(
    op: Builder, last: ir.Node, dys: Sequence[ir.Value], gradients: Mapping[ir.Value, Expr], known: Sequence[ir.Value]
) -> tuple[ir.Graph, list[ir.Value]]:
    """Move the nodes after `last` into a graph of their own, with `gradients` as outputs; what that reads of the rest.

    Its inputs are what it reads, first of what is `known`, and then `dys`. Constants are not among them: they are
    copied.
    """
    graph = op.graph
    made = set(nodes_after(last, graph))
    results = [_put_out(op, made, x, gradient) for x, gradient in gradients.items()]
    added = nodes_after(last, graph)
    tidy(graph, added)

    made = set(added)
    nodes = [node for node in graph if node in made]
    inside = {*nodes, *(inner for node in nodes for inner in nested_nodes(node))}
    all_read = dict.fromkeys(value for node in nodes for value in read_by(node))
    outside = [value for value in all_read if value.graph is graph and value.producer() not in inside]
    constants = [value for value in outside if _is_constant(value)]
    others = [value for value in outside if value not in constants]
    read = [*(value for value in known if value in others), *(value for value in others if value not in known)]

    for value in results:
        graph.outputs.remove(value)
    graph.remove(nodes)
    copies = [_copy_of_constant(value) for value in constants]
    inputs = [ir.Value(name=value.name) for value in read]
    new = dict(zip((*constants, *read), (*(copy.outputs[0] for copy in copies), *inputs), strict=True))
    for old, value in new.items():
        for reader, i in tuple(old.uses()):
            if reader in inside:
                reader.replace_input_with(i, value)
    return ir.Graph([*inputs, *dys], results, nodes=[*copies, *nodes], opset_imports={}), read


def _put_out(op: Builder, made: set[ir.Node], x: ir.Value, gradient: Expr) -> ir.Value:
    """Make a gradient an output, under a name of its own; a copy of it where it is something else already."""
    is_free = gradient.value.producer() in made and not gradient.value.is_graph_output()
    result = (gradient if is_free else op.Identity(gradient)).named(f"d{x.name}").value
    op.graph.outputs.append(result)
    return result


def _is_constant(value: ir.Value) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == "Constant" and producer.domain == ""


def _copy_of_constant(value: ir.Value) -> ir.Node:
    node = cast(ir.Node, value.producer())
    copy = ir.Node("", "Constant", [], list(node.attributes.values()), name=node.name)
    copy.outputs[0].name = value.name
    return copy
