"""Context that passes over one graph share: names in use, inferred types, replacement of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import onnx_ir as ir

from onward.build import Builder, Expr, Names
from onward.errors import UnknownNameError, suggest_or_list
from onward.model import Model
from onward.model.core import values
from onward.model.walk import ancestors
from onward.shapes import dims
from onward.transform.types import fill_in_types, is_symbolic


class Context:
    """A model that several passes change in turn, with shared results.

    Attributes:
        model: The model. A pass that makes another model of it calls `continue_with`.
        names: The names in use. A pass takes new names from here, so that later passes know them.
    """

    def __init__(self, model: Model):
        self.model = model
        self._names: Names | None = None
        self._inferred: set[ir.Value] = set()
        self._is_typed = False

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    @property
    def names(self) -> Names:
        if self._names is None:
            self._names = self.model.names()
        return self._names

    def continue_with(self, model: Model) -> None:
        """Replace the model by another one, such as one from a tool on protobuf."""
        self.model, self._names, self._is_typed = model, None, False
        self._inferred.clear()

    def builder(self, graph: ir.Graph | None = None, *, scope: str = "", share: bool = False) -> Builder:
        """Return a builder for the graph of the model, or for another graph whose nodes will be in it."""
        return Builder(
            self.graph if graph is None else graph,
            opset=self.model.opset,
            names=self.names,
            functions=self.model.functions,
            imports=self.graph.opset_imports,
            scope=scope,
            share=share,
        )

    @contextmanager
    def before(self, node: ir.Node) -> Iterator[Builder]:
        """Yield a builder whose nodes are inserted before a node."""
        scratch = ir.Graph([], [], nodes=[], name="inserted")
        yield self.builder(scratch, scope=node.name or node.op_type)
        added = list(scratch)
        scratch.remove(added)
        node.prepend(added)

    def replace(self, old: ir.Value, new: Expr) -> None:
        """Let all readers of a value read another one, which takes its name and type."""
        name, old.name = old.name, self.names.fresh(f"{old.name}/replaced")
        value = new.value
        value.type = value.type if old.type is None else old.type
        value.shape = value.shape if old.shape is None else old.shape
        old.replace_all_uses_with(value, replace_graph_outputs=True)
        value.name = name

    def forget_types(self) -> None:
        """Infer all types again, after new nodes say more about them."""
        self._inferred.clear()

    def note_types(self, typed: Iterable[ir.Value]) -> None:
        """Mark values as typed by inference."""
        self._inferred.update(typed)
        self._is_typed = True

    def fill_in_types(self, targets: Iterable[ir.Value] | None = None) -> None:
        """Infer missing types of values (default: all of the graph), each value at most once.

        Symbols of inputs count as known sizes. Other symbols, such as those that exporters give to
        sizes which they do not compute, count after the first call: passes add nodes with types.
        """
        targets = list(values(self.graph) if targets is None else targets)
        symbols = None if self._is_typed else _symbols(self.graph.inputs)
        fill_in_types(self.model, targets, lambda value: value in self._inferred or is_symbolic(value, symbols))
        self.note_types(targets)

    def fill_in_types_before(self, ends: Iterable[ir.Value]) -> None:
        """Infer missing types of `ends`, and of all values before them."""
        nodes, read = ancestors(ends)
        self.fill_in_types(read.union(*(node.outputs for node in nodes)))


def _symbols(inputs: Iterable[ir.Value]) -> set[str | None]:
    return {size.value for value in inputs for size in dims(value) or () if isinstance(size, ir.SymbolicDim)}


def values_by_name(graphs: Iterable[ir.Graph], required: Iterable[str]) -> dict[str, ir.Value]:
    """Return name -> value for graphs; raise if a required name is missing."""
    by_name = {value.name: value for graph in graphs for value in values(graph) if value.name}
    if missing := [name for name in required if name not in by_name]:
        listed = ", ".join(f"`{name}`" for name in missing)
        raise UnknownNameError(f"unknown value {listed}", hint=suggest_or_list(missing[0], by_name))
    return by_name
