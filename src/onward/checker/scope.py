"""Interfaces for rules: the whole file (`CheckedModel`), and one graph with its surroundings
(`Scope`).
"""

from __future__ import annotations

from collections import ChainMap, deque
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, MutableSequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from onnx import (
    FunctionProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    StringStringEntryProto,
    TensorProto,
    TrainingInfoProto,
    ValueInfoProto,
)

from onward.checker.codes import bare
from onward.checker.graphs import GraphIndex, NodeView, Site, TensorType, attribute, count, declared_types, walk
from onward.errors import suggest
from onward.model import TRAINING_DOMAIN
from onward.model.protos import bodies
from onward.standard import domain_of, schema_domain

FunctionKey = tuple[str, str, str]  # domain, name, overload


class OverBudget(Exception):
    """Raised if a rule needs too much time; its other findings are unknown."""


class Budget:
    """Limit of work that is not linear in the size of the file."""

    def __init__(self, steps: int):
        self.left = steps

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise OverBudget


class FunctionCall(NamedTuple):
    """A node of the model, and the operator sets of its graph or function."""

    site: Site
    opsets: dict[str, int]
    function: FunctionProto | None
    """Function whose body has the node."""

    @property
    def node(self) -> NodeProto:
        return self.site.node

    @property
    def place(self) -> str:
        return self.site.place


@dataclass(frozen=True, slots=True)
class Gradient:
    """A Gradient node and its attributes."""

    node: NodeView
    xs: tuple[str, ...]
    zs: tuple[str, ...]
    y: str

    @classmethod
    def of(cls, node: NodeView) -> Gradient:
        def texts(name: str) -> tuple[str, ...]:
            attr = attribute(node.proto, name)
            return tuple(text.decode("utf-8", "replace") for text in attr.strings) if attr else ()

        y = attribute(node.proto, "y")
        return cls(node, texts("xs"), texts("zs"), y.s.decode("utf-8", "replace") if y else "")

    @property
    def place(self) -> str:
        return self.node.place

    @property
    def results(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of x and the name of d y / d x, for computed gradients."""
        return ((x, name) for x, name in zip(self.xs, self.node.outputs, strict=False) if name)


class Scope:
    """A graph that is executed, with its surroundings: an algorithm sees inference."""

    def __init__(
        self, subject: CheckedModel, own: GraphIndex, *, outer: GraphIndex | None = None, step: int | None = None
    ):
        self.subject, self.own, self.outer, self.step = subject, own, outer, step
        self.graphs = (own,) if outer is None else (outer, own)
        around = [subject.inference.types] if outer is not None else []
        self.types: MutableMapping[str, TensorType] = ChainMap(declared_types(own.proto), *around)
        self.budget = Budget(2_000_000)

    @property
    def entry(self) -> TrainingInfoProto:
        assert self.step is not None
        return self.subject.proto.training_info[self.step]

    @property
    def initialization(self) -> Scope:
        """Return the scope of the initialization graph of the same step."""
        assert self.step is not None
        return self.subject.initializations[self.step]

    def binding(self, field: str, key: str) -> str:
        """Return the path of a binding: `training_info[0].update_binding["w"]`."""
        return f'training_info[{self.step}].{field}["{bare(key)}"]'

    def producer(self, name: str) -> tuple[NodeView, int] | None:
        return self.own.producers.get(name) or (self.outer.producers.get(name) if self.outer else None)

    def initializer(self, name: str) -> TensorProto | None:
        return next((graph.initializers[name] for graph in self.graphs if name in graph.initializers), None)

    def is_free_input(self, name: str) -> bool:
        """True for an input that a caller must feed."""
        return any(name in graph.inputs and not graph.is_initializer(name) for graph in self.graphs)

    def defines(self, name: str) -> bool:
        return any(graph.defines(name) for graph in self.graphs)

    def read_by(self, name: str) -> list[NodeView]:
        return [node for graph in self.graphs for node in graph.readers.get(name, ())]

    def suggest(self, name: str) -> str | None:
        return self.subject.suggest(name, (other for graph in self.graphs for other in graph.names()))

    @cached_property
    def gradients(self) -> list[Gradient]:
        return [Gradient.of(node) for node in self.own.nodes if node.is_training("Gradient")]

    @cached_property
    def updates(self) -> dict[str, str]:
        return _first_values(self.entry.update_binding)

    @cached_property
    def resets(self) -> dict[str, str]:
        return _first_values(self.entry.initialization_binding)


def versions(imports: Iterable[OperatorSetIdProto]) -> dict[str, int]:
    """Return operator sets by domain; the standard domain has two spellings."""
    return {schema_domain(opset.domain): opset.version for opset in imports}


def function_place(function: FunctionProto) -> str:
    overload = f":{function.overload}" if function.overload else ""
    return f'functions["{bare(function.domain)}::{bare(function.name)}{bare(overload)}"]'


def _first_values(bindings: Iterable[StringStringEntryProto]) -> dict[str, str]:
    """Return bindings as a map, with the first of duplicate keys, which are errors."""
    pairs: dict[str, str] = {}
    for binding in bindings:
        pairs.setdefault(binding.key, binding.value)
    return pairs


class CheckedModel:
    """The whole file."""

    def __init__(self, proto: ModelProto, base_dir: Path | None):
        self.proto, self.base_dir = proto, base_dir
        self.functions: dict[FunctionKey, FunctionProto] = {}
        for function in proto.functions:
            self.functions.setdefault((function.domain, function.name, function.overload), function)
        self.opsets = versions(proto.opset_import)
        self._hints = Budget(20_000)
        graph = GraphIndex(proto.graph, "graph")
        self.inference = Scope(self, graph)
        self.steps: list[Scope] = []
        self.initializations: list[Scope] = []
        for i, entry in enumerate(proto.training_info):
            algorithm = GraphIndex(entry.algorithm, f"training_info[{i}].algorithm")
            self.steps.append(Scope(self, algorithm, outer=graph, step=i))
            initialization = GraphIndex(entry.initialization, f"training_info[{i}].initialization")
            self.initializations.append(Scope(self, initialization, step=i))

    @property
    def scopes(self) -> Iterator[Scope]:
        """Yield the scope of every graph that is executed, without empty initializations."""
        yield self.inference
        yield from self.steps
        yield from (scope for scope in self.initializations if not scope.own.is_empty)

    @cached_property
    def updated(self) -> set[str]:
        """Return all variables that a step updates."""
        return {key for step in self.steps for key in step.updates}

    @cached_property
    def calls(self) -> list[FunctionCall]:
        """Return all nodes of the model, including those in functions."""
        calls = [FunctionCall(site, self.opsets, None) for scope in self.scopes for site in scope.own.sites]
        for function in self.proto.functions:
            opsets = versions(function.opset_import)
            calls += [FunctionCall(site, opsets, function) for site in walk(function.node, function_place(function))]
        return calls

    @cached_property
    def homes(self) -> dict[str, int]:
        """Return each name that an algorithm defines, with the first step that defines it."""
        homes: dict[str, int] = {}
        for i, step in enumerate(self.steps):
            for name in step.own.names():
                homes.setdefault(name, i)
        return homes

    def function(self, node: NodeProto) -> FunctionProto | None:
        return self.functions.get((domain_of(node), node.op_type, node.overload))

    def suggest(self, name: str, names: Iterator[str]) -> str | None:
        """Return a suggestion for a name. Comparing is slow, so hints end after some thousands."""
        candidates = [other for other in islice(names, max(self._hints.left, 0)) if len(other) <= 100]
        with suppress(OverBudget):
            self._hints.spend(len(candidates) + 1)
            return suggest(name, candidates) if len(name) <= 100 else None
        return None


# ---- combined graphs -------------------------------------------------------------------------------------------------


# Models of a graph, or of inference and an algorithm, for onnx.checker and shape inference.
#
# A large initializer becomes an input of the same name, type and shape, which is all that those two read. So weights
# cost nothing here, and external data is not opened.

_SMALL = 256  # elements; shapes, axes and other values that shape inference computes with are smaller


def model_of(scope: Scope) -> ModelProto:
    source = scope.subject.proto
    model = ModelProto(ir_version=source.ir_version, opset_import=source.opset_import, functions=source.functions)
    model.graph.name = scope.own.proto.name or "graph"
    combined = model.graph
    for graph in scope.graphs:
        combined.node.extend(graph.proto.node)
        combined.input.extend(graph.proto.input)
        combined.output.extend(graph.proto.output)
        combined.value_info.extend(graph.proto.value_info)
        for sparse in graph.proto.sparse_initializer:  # shape inference refuses sparse tensors that nodes read as dense
            name = sparse.values.name
            combined.sparse_initializer.add().CopyFrom(sparse)
            combined.sparse_initializer[-1].values.name = f"onward:sparse:{name}"
            if name not in graph.inputs:
                combined.input.append(_value(name, sparse.values.data_type, sparse.dims))
        for tensor in graph.proto.initializer:
            if tensor.data_location != TensorProto.EXTERNAL and count(tensor.dims) <= _SMALL:
                combined.initializer.append(tensor)
            elif tensor.name not in graph.inputs:
                combined.input.append(_value(tensor.name, tensor.data_type, tensor.dims))
    if TRAINING_DOMAIN in versions(model.opset_import):
        _type_gradients(combined.node)
    return model


def _value(name: str, elem: int, dims: Iterable[int]) -> ValueInfoProto:
    value = ValueInfoProto(name=name)
    tensor = value.type.tensor_type
    tensor.elem_type = elem
    tensor.shape.SetInParent()  # without dimensions it would be unknown, not a scalar
    for dim in dims:
        tensor.shape.dim.add().dim_value = dim
    return value


def _type_gradients(nodes: MutableSequence[NodeProto]) -> None:
    """Let nodes read typed copies of the inputs of a Gradient in place of its results.

    Each gradient has the type of its x. Shape inference does not know that and would stop there.
    Nested graphs are changed too.
    """
    originals = list(nodes)
    del nodes[:]
    for node in originals:
        for body in bodies(node):
            _type_gradients(body.node)
        copies = []
        if (node.domain, node.op_type) == (TRAINING_DOMAIN, "Gradient"):
            for i, (x, result) in enumerate(zip(node.input, node.output, strict=False)):
                if x and result:
                    copies.append(NodeProto(op_type="Identity", input=[x], output=[result]))
                    node.output[i] = f"onward:gradient:{result}"
        nodes.extend([node, *copies])


# ---- dependencies ----------------------------------------------------------------------------------------------------


Inputs = Callable[[NodeView, int], Iterable[str]]


def upstream(
    scope: Scope,
    starts: Iterable[str],
    *,
    stop: Collection[str] = (),
    inputs: Inputs = NodeView.behind,
    passes: Callable[[str], bool] = lambda name: True,
    until: Callable[[str], bool] = lambda name: False,
    through_time: bool = False,
) -> dict[str, None]:
    """Return the names from which `starts` are computed, including themselves, nearest first.

    stop: names to stop at. inputs: the inputs of a node to follow. passes: True for values to follow. until: True
    ends the search. through_time: follow variables to their new values of the step before.
    """
    seen = dict.fromkeys(starts)
    expanded: set[object] = set()
    todo = deque(seen)
    while todo:
        name = todo.popleft()
        if until(name):
            break
        if name in stop or not passes(name):
            continue
        reads: Iterable[str] = ()
        if producer := scope.producer(name):
            node, output = producer
            # The outputs of a node have the same inputs, except those of an optimizer.
            origin = node if node.tuples is None else producer
            if origin not in expanded:
                expanded.add(origin)
                reads = inputs(node, output)
                if node.is_training("Gradient"):  # it reads its y, by name
                    reads = (*reads, *filter(None, [Gradient.of(node).y]))
        elif through_time and name in scope.updates:
            reads = (scope.updates[name],)
        scope.budget.spend(1)
        for read in reads:
            if read not in seen:
                seen[read] = None
                todo.append(read)
    return seen


def leaves(scope: Scope, names: Iterable[str]) -> list[str]:
    """Return the names that no node computes: inputs, initializers, and undefined names."""
    return [name for name in names if scope.producer(name) is None]
