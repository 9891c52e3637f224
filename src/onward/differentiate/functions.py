"""Gradients of functions that stay functions: each is differentiated once for every kind of call.

A call `y = f(x)` becomes `y, kept... = f_forward(x)`, where `kept` is what the way back reads of what happens inside,
and its gradient is `dx = f_backward(x, y, kept..., dy)`. Two calls are of a kind if types, shapes and small constants
among their inputs are the same, their attributes, the inputs that need a gradient and the outputs that have one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from onward.build import Builder, Expr, Names
from onward.containers import content_type
from onward.differentiate.expand import expanded
from onward.differentiate.path import way
from onward.differentiate.simplify import tidy
from onward.differentiate.sweep import pull_back
from onward.model import Model
from onward.model.core import values
from onward.model.walk import nested_graphs, nodes_after, read_by
from onward.rules import NoGradient, Rewrite, Rule
from onward.rules.registry import lookup
from onward.shapes import constant_ints
from onward.transform.training import drop_unused_definitions
from onward.transform.types import fill_in_types


@dataclasses.dataclass(frozen=True)
class _Halves:
    """A function that was differentiated."""

    forward: str
    backward: str
    kept: tuple[ir.Value, ...]
    """What the first half puts out after the outputs of the function."""
    read: tuple[int, ...]
    """What the second half reads, by positions among the inputs, the outputs and what is kept; then come gradients."""
    gradients: dict[int, ir.Value]
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
        for result, (i, gradient) in zip(results, halves.gradients.items(), strict=True):
            result.value.type = gradient.type
            found[i] = result
        return found

    def _of_kind(self, node: ir.Node, wanted: Sequence[int], given: Sequence[int]) -> _Halves | None:
        attributes = (ir.serde.serialize_attribute(attribute) for attribute in node.attributes.values())
        kind = (
            node.op_identifier(),
            _described(node.inputs),
            tuple(sorted(attribute.SerializeToString(deterministic=True) for attribute in attributes)),
            len(node.outputs),
            tuple(wanted),
            tuple(given),
        )
        if kind not in self._halves:
            self._halves[kind] = self._differentiated(node, wanted, given)
        return self._halves[kind]

    def _differentiated(self, node: ir.Node, wanted: Sequence[int], given: Sequence[int]) -> _Halves | None:
        """The two halves for calls like this one; None if no gradient flows through it."""
        model, formals = self._body(node)
        for i in given:
            output = model.graph.outputs[i].name or ""
            model = expanded(model, output, [formals[x] for x in wanted], keep_functions=True)
        graph, last = model.graph, model.graph[-1]
        known = {value.name: value for value in values(graph)}
        fill_in_types(model, known.values())
        inputs = [known[name] if name in known else ir.Value(name=name) for name in formals]
        outputs = list(graph.outputs)

        names = model.names()
        names.take(formals)
        op = Builder(
            graph, opset=self._opset, names=names, functions=self._functions, imports=self._imports, share=True
        )
        sources = [inputs[i] for i in wanted]
        on_the_way = {inner for i in given for inner in way(outputs[i], sources, self)}
        seeds = {outputs[i]: op(_gradient_of(outputs[i], names)) for i in given}
        found = pull_back(op, [inner for inner in graph if inner in on_the_way], seeds, sources, find=self)
        if not found:
            return None
        results = {i: _put_out(op, last, found[inputs[i]], inputs[i]) for i in wanted if inputs[i] in found}
        made = nodes_after(last, graph)
        tidy(graph, made)

        dys = [seed.value for seed in seeds.values()]
        backward, read = _split_off([inner for inner in made if inner.graph is graph], dys, list(results.values()))
        kept = tuple(value for value in read if value not in inputs and value not in outputs)
        graph.initializers.clear()
        graph.inputs.clear()
        graph.inputs.extend(inputs)
        graph.outputs.extend(kept)
        seen = [*inputs, *outputs, *kept]
        return _Halves(
            self._written(graph, node, "forward", "with what its gradient needs"),
            self._written(backward, node, "backward", "on the way back"),
            kept,
            tuple(seen.index(value) for value in read),
            results,
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
            opset_imports={**function.opset_imports, **self._imports},
            name=function.name,
        )
        InlinePass()(ir.Model(graph, ir_version=self._ir_version or 10, functions=[function]))
        for inner, written in zip(graph, function, strict=True):
            inner.name = written.name  # the pass gives all of them names, such as node_7
        model = Model(ir.Model(graph, ir_version=self._ir_version or 10, functions=[*self._functions.values()]))
        drop_unused_definitions(model)
        return model, [formal.name or "" for formal in function.inputs][: len(inputs)]

    def _written(self, graph: ir.Graph, node: ir.Node, half: str, meaning: str) -> str:
        """The name of a function with this graph: a new one, unless another kind of call has led to the same."""
        for value in values(graph):  # it serves all calls of a kind, and symbols of one mean nothing to another
            value.type = value.shape = None
        graph.name = None
        domains = {"", *(inner.domain for inner in graph.all_nodes())}
        graph.opset_imports.clear()
        graph.opset_imports.update({domain: self._imports[domain] for domain in domains if domain in self._imports})
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


def _described(inputs: Iterable[ir.Value | None]) -> tuple[object, ...]:
    """What gradients of functions depend on. Of symbols among the sizes it only matters which are the same."""
    symbols: dict[object, str] = {}

    def size(n: int | ir.SymbolicDim) -> object:
        return n if isinstance(n, int) or n.value is None else symbols.setdefault(n.value, f"size{len(symbols)}")

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
    count = len(node.outputs)
    node.op_type, node.overload = halves.forward, ""
    node.attributes.clear()
    node.resize_outputs(count + len(halves.kept))
    label = node.name or node.op_type
    for i, output in enumerate(node.outputs):
        kept = halves.kept[i - count] if i >= count else None
        if kept is not None:
            output.type = kept.type
        if not output.name:  # ONNX Runtime takes none that is left out before another
            output.name = op.names.fresh(f"{label}/{kept.name if kept is not None else 'unused'}")
    return list(node.outputs)


# ---- the two halves --------------------------------------------------------------------------------------------------


def _gradient_of(output: ir.Value, names: Names) -> ir.Value:
    return ir.Value(name=names.fresh(f"d{output.name}"), type=content_type(output), shape=output.shape)


def _put_out(op: Builder, last: ir.Node, gradient: Expr, x: ir.Value) -> ir.Value:
    """Make a gradient an output, under a name of its own; a copy of it where it is something else already."""
    producer = gradient.value.producer()
    is_free = producer in nodes_after(last, op.graph) and not gradient.value.is_graph_output()
    result = (gradient if is_free else op.Identity(gradient)).named(f"d{x.name}").value
    op.graph.outputs.append(result)
    return result


def _split_off(
    made: Sequence[ir.Node], dys: Sequence[ir.Value], results: Sequence[ir.Value]
) -> tuple[ir.Graph, list[ir.Value]]:
    """Move nodes from the end of a graph, and `results`, into a graph of their own; and what that reads of the first.

    The inputs of the new graph are in the order of what it reads, followed by `dys`. Constants are not among them: it
    has its own.
    """
    graph = cast(ir.Graph, made[0].graph)
    there = {*made, *(inner for node in made for nested in nested_graphs(node) for inner in nested.all_nodes())}
    all_read = dict.fromkeys(value for node in made for value in read_by(node))
    read = [value for value in all_read if value.graph is graph and value.producer() not in there]
    order = {value: i for i, value in enumerate(values(graph))}
    constants = [value for value in read if _is_constant(value)]
    needed = sorted((value for value in read if value not in constants), key=order.__getitem__)

    for value in results:
        graph.outputs.remove(value)
    graph.remove(made)
    copies = [_copy_of_constant(value) for value in constants]
    inputs = [ir.Value(name=value.name) for value in needed]
    new = dict(zip((*constants, *needed), (*(copy.outputs[0] for copy in copies), *inputs), strict=True))
    for old, value in new.items():
        for reader, i in tuple(old.uses()):
            if reader in there:
                reader.replace_input_with(i, value)
    return ir.Graph([*inputs, *dys], results, nodes=[*copies, *made], opset_imports={}, name=None), needed


def _is_constant(value: ir.Value) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == "Constant" and producer.domain == ""


def _copy_of_constant(value: ir.Value) -> ir.Node:
    node = cast(ir.Node, value.producer())
    copy = ir.Node("", "Constant", [], list(node.attributes.values()), name=node.name)
    copy.outputs[0].name = value.name
    return copy
