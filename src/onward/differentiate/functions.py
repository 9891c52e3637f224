"""Gradients of functions that stay functions: each is differentiated once for all similar calls.

A call `y = f(x)` becomes `y, saved... = f_forward(x)`, where `saved` are the intermediate values that the backward pass
reads. Its gradient is `dx = f_backward(x, y, saved..., dy)`. Calls are similar if they agree in attributes, in types,
shapes and small constants among their inputs, in the inputs that need a gradient, and in the outputs that have one.
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
from onward.differentiate.sweep import nodes_to_differentiate, pull_back, renamable
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
    """A differentiated function: the names of its two halves and their interface."""

    forward: str
    backward: str
    saved: tuple[tuple[str, ir.TypeProtocol | None], ...]
    """Further outputs of the first half."""
    read: tuple[int, ...]
    """Inputs of the second half before the gradients: indices among inputs, outputs and saved values."""
    gradients: dict[int, ir.TypeProtocol | None]
    """Outputs of the second half: index of an input of the function -> type of its gradient."""


class FunctionRules:
    """Lookup of rules that also has one for calls of the functions of a model, to which it adds."""

    def __init__(self, model: Model):
        self._functions = model.functions
        self._imports = model.graph.opset_imports
        self._ir_version = model.ir.ir_version
        self._opset = model.opset
        self._names = Names(name for _, name, _ in model.functions)
        self._halves: dict[tuple[object, ...], _Halves | None] = {}
        self._contents: dict[tuple[object, ...], str] = {}

    def __call__(self, node: ir.Node) -> Rule | Rewrite | NoGradient | None:
        rule = lookup(node)
        if rule is not None or node.op_identifier() not in self._functions:
            return rule
        keywords = {"node": None, "wanted": None}
        return Rule((node.domain, node.op_type), self._gradient, keywords=keywords, many=True)

    def _gradient(
        self, op: Builder, dys: Sequence[Expr | None], *inputs: Expr | None, node: ir.Node, wanted: Sequence[int]
    ) -> list[Expr | None]:
        """Let the call return what the backward pass reads, and call the second half."""
        with_gradient = [i for i, dy in enumerate(dys) if dy is not None]
        halves = self._halves_for(node, wanted, with_gradient)
        gradients: list[Expr | None] = [None] * len(inputs)
        if halves is None:
            return gradients
        available = [*inputs, *map(op, _call_forward(op, node, halves))]
        inputs_of_backward = [*(available[i] for i in halves.read), *(dys[i] for i in with_gradient)]
        results = op.node(node.domain, halves.backward, *inputs_of_backward, outputs=len(halves.gradients))
        results = results if isinstance(results, tuple) else (results,)
        for result, (i, type_) in zip(results, halves.gradients.items(), strict=True):
            result.value.type = type_
            gradients[i] = result
        return gradients

    def _halves_for(self, node: ir.Node, wanted: Sequence[int], with_gradient: Sequence[int]) -> _Halves | None:
        attributes = (ir.serde.serialize_attribute(attribute) for attribute in node.attributes.values())
        key = (
            node.op_identifier(),
            _signature_key(node.inputs),
            tuple(sorted(attribute.SerializeToString(deterministic=True) for attribute in attributes)),
            len(node.outputs),
            tuple(wanted),
            tuple(with_gradient),
        )
        if key not in self._halves:
            try:
                self._halves[key] = self._differentiated(node, wanted, with_gradient)
            except UnsupportedError as error:
                raise UnsupportedError(f"{error.message}\nin the function `{node.op_type}`", hint=error.hint) from error
        return self._halves[key]

    def _differentiated(self, node: ir.Node, wanted: Sequence[int], with_gradient: Sequence[int]) -> _Halves | None:
        """Return the two halves for similar calls; None if no gradient flows through them."""
        model, formals = self._body(node)
        context = Context(model)
        for i in with_gradient:
            output = context.graph.outputs[i].name or ""
            expand(context, output, [formals[x] for x in wanted], keep_functions=True)
        model = context.model
        by_name = {value.name: value for value in values(model.graph)}
        context.fill_in_types(by_name.values())
        inputs = [by_name[name] if name in by_name else ir.Value(name=name) for name in formals]
        graph, last, outputs = model.graph, model.graph[-1], list(model.graph.outputs)

        names = context.names
        names.take(formals)
        op = Builder(
            graph, opset=self._opset, names=names, functions=self._functions, imports=self._imports, share=True
        )
        sources = [inputs[i] for i in wanted]
        path_nodes = {inner for i in with_gradient for inner in nodes_to_differentiate(outputs[i], sources, self)}
        dys = {
            y: ir.Value(name=names.fresh(f"d{y.name}"), type=content_type(y), shape=y.shape)
            for y in (outputs[i] for i in with_gradient)
        }
        seeds = {output: op(dy) for output, dy in dys.items()}
        gradients = pull_back(op, [inner for inner in graph if inner in path_nodes], seeds, sources, find=self)
        if not gradients:
            return None

        backward, read = split_backward(op, last, list(dys.values()), gradients, [*inputs, *outputs])
        saved = [value for value in read if value not in inputs and value not in outputs]
        graph.initializers.clear()
        graph.inputs.clear()
        graph.inputs.extend(inputs)
        graph.outputs.extend(saved)
        available = [*inputs, *outputs, *saved]
        return _Halves(
            saved=tuple((value.name or "", value.type) for value in saved),
            read=tuple(available.index(value) for value in read),
            gradients={inputs.index(x): gradient.value.type for x, gradient in gradients.items()},
            forward=self._add_function(graph, node, "forward", "with the values that its gradient reads"),
            backward=self._add_function(backward, node, "backward", "backward pass"),
        )

    def _body(self, node: ir.Node) -> tuple[Model, list[str]]:
        """Return a model of the body of a call, and the names of the inputs of the call in it.

        Small constants among the inputs become constants in the model, for rules and shape inference. An omitted input
        has a name but no value.
        """
        function = self._functions[node.op_identifier()]
        inputs = [_input(value, formal) for value, formal in zip(node.inputs, function.inputs, strict=False)]
        attributes = list(node.attributes.values())
        call = ir.Node(
            node.domain, node.op_type, inputs, attributes, overload=node.overload, num_outputs=len(function.outputs)
        )
        for output, formal in zip(call.outputs, function.outputs, strict=True):
            output.name = formal.name
        present = [value for value in inputs if value is not None]
        graph = ir.Graph(
            [value for value in present if value.const_value is None],
            call.outputs[: len(node.outputs)],
            nodes=[call],
            initializers=[value for value in present if value.const_value is not None],
            opset_imports=dict(self._imports),
            name=function.name,
        )
        InlinePass()(ir.Model(graph, ir_version=self._ir_version or IR_VERSION, functions=[function]))
        for inner, original in zip(graph.all_nodes(), function.all_nodes(), strict=True):
            inner.name = original.name  # the pass gives all of them names, such as node_7
        model = Model(ir.Model(graph, ir_version=self._ir_version or IR_VERSION, functions=[*self._functions.values()]))
        drop_unused_definitions(model)
        return model, [formal.name or "" for formal in function.inputs][: len(inputs)]

    def _add_function(self, graph: ir.Graph, node: ir.Node, half: str, meaning: str) -> str:
        """Return the name of a function with this graph: a new or an equal one."""
        for value in values(graph):  # all similar calls share the function, but not their symbols
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
    """Return types, shapes and small constants of inputs; symbols count by which are equal."""
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
    """Return the input of a call as the function sees it."""
    if value is None:
        return None
    inside = ir.Value(name=formal.name, type=value.type, shape=value.shape)
    numbers = constant_ints(value)
    if numbers is not None and value.dtype is not None and value.shape is not None and value.shape.is_static():
        array = np.array(numbers, value.dtype.numpy()).reshape(value.shape.numpy())
        inside.const_value = ir.Tensor(array, dtype=value.dtype, name=formal.name)
    return inside


def _call_forward(op: Builder, node: ir.Node, halves: _Halves) -> list[ir.Value]:
    """Let a node call the first half instead of the function; return its outputs."""
    count, label = len(node.outputs), node.name or node.op_type
    node.op_type, node.overload = halves.forward, ""
    node.attributes.clear()
    node.resize_outputs(count + len(halves.saved))
    for output, (name, type_) in zip(node.outputs[count:], halves.saved, strict=True):
        output.name, output.type = op.names.fresh(f"{label}/{name}"), type_
    for output in node.outputs[:count]:  # ONNX Runtime refuses an omitted output before another one
        output.name = output.name or op.names.fresh(f"{label}/unused")
    return list(node.outputs)


# ---- cutting the backward pass off -----------------------------------------------------------------------------------


def split_backward(
    op: Builder, last: ir.Node, dys: Sequence[ir.Value], gradients: Mapping[ir.Value, Expr], first: Sequence[ir.Value]
) -> tuple[ir.Graph, list[ir.Value]]:
    """Move the nodes after `last` into a new graph with `gradients` as outputs; return it and the values that it reads.

    These are its inputs, those in `first` first, followed by `dys`. Constants are copied instead.
    """
    graph = op.graph
    added_nodes = set(nodes_after(last, graph))
    results = []
    for x, gradient in gradients.items():
        results.append(renamable(op, gradient, added_nodes).named(f"d{x.name}").value)
        graph.outputs.append(results[-1])
    added = nodes_after(last, graph)
    tidy(graph, added)

    added_nodes = set(added)
    nodes = [node for node in graph if node in added_nodes]
    inside = {*nodes, *(inner for node in nodes for inner in nested_nodes(node))}
    all_read = dict.fromkeys(value for node in nodes for value in read_by(node))
    outside = [value for value in all_read if value.graph is graph and value.producer() not in inside]
    constants = [value for value in outside if _is_constant(value)]
    others = [value for value in outside if value not in constants]
    read = [*(value for value in first if value in others), *(value for value in others if value not in first)]

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


def _is_constant(value: ir.Value) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == "Constant" and producer.domain == ""


def _copy_of_constant(value: ir.Value) -> ir.Node:
    node = cast(ir.Node, value.producer())
    copy = ir.Node("", "Constant", [], list(node.attributes.values()), name=node.name)
    copy.outputs[0].name = value.name
    return copy
