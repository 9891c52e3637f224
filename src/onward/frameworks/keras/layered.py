"""Inference models as functional Keras models.

Nodes that compute what a layer of Keras computes become that layer. The others are collected in
`Operations` layers, as few as possible. Keras has channels last: a tensor may exist in both layouts,
each made from the other by a Permute when it is first read.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import onnx_ir as ir

from onward.constants import constant_tensor
from onward.engines.keras.types import available
from onward.errors import UnsupportedError, list_names
from onward.frameworks.formulas.graph_building import model_of, open_initializers
from onward.frameworks.keras.layer_rows import ROWS, SHARED, Layout, Make, dtype_of, rank_of
from onward.frameworks.keras.step_graphs import Executable
from onward.frameworks.program.source_text import Identifiers, identifier
from onward.model import Model, load
from onward.model.core import values
from onward.model.walk import attributes, captured_values, read_by
from onward.transform.extract import extract
from onward.transform.inline import inline
from onward.transform.types import fill_in_types


@keras.saving.register_keras_serializable(package="onward")
class Operations(keras.layers.Layer):  # type: ignore[misc]
    """Layer that computes a graph of ONNX operators by `keras.ops`."""

    def __init__(self, graph: str, trained: Sequence[str] = (), **options: Any):
        super().__init__(**{"autocast": False, **options})
        self._graph, self.trained = graph, list(trained)
        self.model = load(base64.b64decode(graph))
        self.weights_by_name = {
            name: self._weight(name, value.const_value.numpy())
            for name, value in self.model.graph.initializers.items()
            if value.const_value is not None and (name in self.trained or _is_weight(value))
        }
        self._execute = Executable(self.opened())

    def _weight(self, name: str, array: np.ndarray) -> Any:
        options = {"shape": array.shape, "dtype": available(str(array.dtype)), "trainable": name in self.trained}
        weight = self.add_weight(name=identifier(name), initializer="zeros", **options)
        weight.assign(array)
        return weight

    def opened(self) -> Model:
        """Return the graph with the weights as inputs."""
        model = self.model.copy()
        open_initializers(model.graph, self.weights_by_name)
        return model

    def call(self, inputs: Any) -> Any:
        names = (value.name or "" for value in self.model.inputs)
        tensors = dict(zip(names, keras.tree.flatten(inputs), strict=True))
        tensors |= {name: keras.ops.convert_to_tensor(weight) for name, weight in self.weights_by_name.items()}
        results = list(self._execute(tensors).values())
        return results[0] if len(results) == 1 else results

    def compute_output_spec(self, inputs: Any) -> Any:
        """Return shapes as the graph has them; tracing would ask for sizes that are known when it runs."""
        outputs = self.model.outputs
        if any(value.shape is None or value.dtype is None for value in outputs):
            return super().compute_output_spec(inputs)
        sizes = [[size if isinstance(size, int) else None for size in value.shape or ()] for value in outputs]
        names = [available(value.dtype.numpy().name) for value in outputs if value.dtype is not None]
        specs = [keras.KerasTensor(shape, dtype) for shape, dtype in zip(sizes, names, strict=True)]
        return specs[0] if len(specs) == 1 else specs

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "graph": self._graph, "trained": self.trained}


def _is_weight(value: ir.Value) -> bool:
    """True for a float tensor that is not a scalar, which a layer has as a variable."""
    tensor = value.const_value
    return tensor is not None and tensor.dtype.is_floating_point() and bool(len(tensor.shape))


def layered_model(model: Model, parameters: Iterable[str]) -> Any:
    """Return an inference model, whose `parameters` are initializers, as a functional Keras model."""
    return LayerBuilder(model, parameters).build()


class LayerBuilder:
    """Builder of layers from the nodes of a graph."""

    def __init__(self, model: Model, parameters: Iterable[str]):
        self.model = inline(model)
        fill_in_types(self.model, values(self.model.graph))
        self.opset = self.model.opset
        self.parameters = set(parameters)
        self._outputs = set(self.model.graph.outputs)
        self._tied = {value for name in self.parameters if self._is_tied(value := self.model.graph.initializers[name])}
        self._layers: dict[Any, Any] = {}
        self._names = Identifiers()
        self._tensors: dict[ir.Value, dict[Layout, Any]] = {}
        self._merged: set[ir.Node] = set()
        self._computed: dict[ir.Value, set[ir.Value]] = {}
        """Values that depend on no input, except by shapes, those of these tensors. They are computed where they are
        read."""

    def build(self) -> Any:
        inputs = []
        for value in self.model.inputs:
            assert value.dtype is not None and value.shape is not None
            sizes = tuple(size if isinstance(size, int) else None for size in value.shape)
            name = self._names.like(value.name or "input")
            inputs.append(keras.Input(batch_shape=sizes, dtype=value.dtype.numpy().name, name=name))
            self._tensors[value] = {"first": inputs[-1]}
        for value in self._tied:
            self._put_weight(value)
        for step in self._plan():
            step()
        outputs = [self.get(value) for value in self.model.graph.outputs]
        name = self._names.like(self.model.graph.name or "model")
        return keras.Model(*(x[0] if len(x) == 1 else x for x in (inputs, outputs)), name=name)

    def _plan(self) -> Iterator[Make]:
        """Yield functions that create the layers, in order."""
        stages: dict[ir.Value, int] = {}
        groups: dict[int, list[ir.Node]] = {}
        layers: dict[int, list[Make]] = {}
        in_groups: set[ir.Value] = set()
        for node in self.model.graph:
            if node in self._merged:
                continue
            read, sources = [value for value in read_by(node) if self.is_tensor(value)], self._sources(node)
            if node.op_type in ("Shape", "Size") or not read:
                self._computed |= dict.fromkeys(node.outputs, sources)
                continue
            make = self._layer(node)
            if make is None:
                stage = max(stages.get(value, 0) for value in sources)
            else:
                stage = max(stages.get(value, 0) + (value in in_groups) for value in read)
            results = list(node.outputs)
            if make is None:
                groups.setdefault(stage, []).append(node)
                in_groups.update(results)
            else:
                layers.setdefault(stage, []).append(functools.partial(_make, node, make))
                results += [output for merged in self._merged for output in merged.outputs if output not in stages]
            stages.update(dict.fromkeys(results, stage))
        for stage in range(max([-1, *groups, *layers]) + 1):
            yield from layers.get(stage, [])
            for nodes in self._components(groups.get(stage, [])):
                yield lambda nodes=nodes: self._operations(nodes)  # type: ignore[misc]
        rest = [value for value in self.model.graph.outputs if value in self._computed]
        if rest:
            yield lambda: self._operations([], rest)

    def _sources(self, node: ir.Node) -> set[ir.Value]:
        """Return the tensors that a node reads, also by shapes of them."""
        read = [value for value in read_by(node) if value in self._computed or self.is_tensor(value)]
        return {source for value in read for source in self._computed.get(value, {value})}

    def _components(self, nodes: Sequence[ir.Node]) -> list[list[ir.Node]]:
        """Return groups of nodes that are connected by the values that they pass on."""
        parents: dict[ir.Node, ir.Node] = {node: node for node in nodes}

        def root(node: ir.Node) -> ir.Node:
            while parents[node] is not node:
                node = parents[node]
            return node

        for node in nodes:
            for value in self._sources(node):
                if (producer := value.producer()) in parents:
                    parents[root(node)] = root(producer)
        groups: dict[ir.Node, list[ir.Node]] = {}
        for node in nodes:
            groups.setdefault(root(node), []).append(node)
        return list(groups.values())

    def is_tensor(self, value: ir.Value | None) -> bool:
        """True if a value depends on elements of an input."""
        if value is None or value in self._computed:
            return False
        return value in self._tied or constant_tensor(value) is None

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def get(self, value: ir.Value, layout: Layout = "first") -> Any:
        """Return a tensor in a layout."""
        tensors, rank = self._tensors[value], rank_of(value) or 0
        if rank < 3:
            return next(iter(tensors.values()))
        if layout not in tensors:
            order = [*range(2, rank), 1] if layout == "last" else [rank - 1, *range(1, rank - 1)]
            tensors[layout] = keras.layers.Permute(order, dtype=dtype_of(value))(next(iter(tensors.values())))
        return tensors[layout]

    def put(self, value: ir.Value, tensor: Any, layout: Layout = "first") -> None:
        self._tensors[value] = {layout: tensor}

    def layout_of(self, inputs: Sequence[ir.Value]) -> Layout:
        """Return the layout in which most of the tensors exist."""
        return "last" if sum("last" in self._tensors[value] for value in inputs) * 2 > len(inputs) else "first"

    def array(self, value: ir.Value | None) -> np.ndarray | None:
        """Return the elements of a constant."""
        tensor = constant_tensor(value) if value is not None and value not in self._tied else None
        return None if tensor is None else tensor.numpy()

    def apply(self, kind: Any, node: ir.Node, tensors: Any, weights: Sequence[Any] = (), **options: Any) -> Any:
        """Return the result of a layer, the same for nodes that read the same weights."""
        key = (kind, str(options), *_constants(node)) if weights else None
        if key in self._layers:
            return self._layers[key](tensors)
        name = self._names.like(node.name or node.op_type)
        layer = kind(name=name, dtype=dtype_of(node.outputs[0]), **options)
        result = layer(tensors)
        if weights:
            layer.set_weights(weights)
            layer.trainable = any(value is not None and value.name in self.parameters for value in node.inputs)
            self._layers[key] = layer
        return result

    def _is_tied(self, value: ir.Value) -> bool:
        """True if nodes read a parameter that cannot share a layer."""
        readers = {use.node for use in value.uses()}
        calls = {(node.op_type, str(attributes(node, self.opset)), *_constants(node)) for node in readers}
        return len(readers) > 1 and (len(calls) > 1 or next(iter(readers)).op_type not in SHARED)

    def _put_weight(self, value: ir.Value) -> None:
        """Create a layer that has a tied parameter and returns it, whatever its input is."""
        first = self.model.inputs[0]
        graph = ir.Graph([], [], nodes=[], name="weight", opset_imports={"": self.opset})
        weight = ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
        graph.register_initializer(weight)
        graph.inputs.append(ir.Value(name="input", type=first.type, shape=first.shape))
        node = ir.node("Identity", [weight])
        node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "output", value.type, value.shape
        graph.append(node)
        graph.outputs.append(node.outputs[0])
        self.put(value, self._operations_layer(model_of(graph), value.name or "weight")([self.get(first)]))

    # ---- layers ------------------------------------------------------------------------------------------------------

    def _layer(self, node: ir.Node) -> Make | None:
        """Return the function that creates the layer of a node, or None if no layer computes it."""
        row = ROWS.get(node.op_type) if node.domain == "" else None
        is_typed = all(value.dtype is not None for value in node.outputs[:1])
        if row is None or not is_typed or any(value.uses() for value in node.outputs[1:]):
            return None
        return row(self, node, attributes(node, self.opset))

    def merge(self, node: ir.Node, operator: str) -> tuple[ir.Node, ir.Value] | None:
        """Return the only reader of a node and its other operand, if it is this operator."""
        uses = list(node.outputs[0].uses())
        if len(uses) != 1 or node.outputs[0] in self._outputs or uses[0].node.op_type != operator:
            return None
        reader = uses[0].node
        other = reader.inputs[1 - uses[0].idx]
        return None if other is None else (reader, other)

    def skip(self, node: ir.Node) -> None:
        """Leave out a node whose result another layer computes."""
        self._merged.add(node)

    # ---- operations --------------------------------------------------------------------------------------------------

    def _operations(self, nodes: list[ir.Node], outputs: Sequence[ir.Value] = ()) -> None:
        """Create a layer that computes nodes, with the computations of shapes that they read."""
        inside = set(nodes)
        pending = [*captured_values(nodes), *outputs]
        while pending:
            value = pending.pop()
            node = value.producer()
            if value in self._computed and node is not None and node not in inside:
                inside.add(node)
                pending += read_by(node)
        read = captured_values([n for n in self.model.graph if n in inside])
        inputs = [value for value in read if value in self._tensors]
        results = [
            value
            for node in nodes
            for value in node.outputs
            if value in self._outputs or any(use.node not in inside for use in value.uses())
        ]
        results += outputs
        part = extract(self.model, [v.name or "" for v in inputs], [v.name or "" for v in results])
        layer = self._operations_layer(part, (nodes[0].name if nodes else "") or "operations")
        try:
            tensors = layer([self.get(value) for value in inputs])
        except Exception as error:  # of any backend
            operators = list_names(list(dict.fromkeys(node.op_type for node in nodes)), 5)
            raise UnsupportedError(
                f"Keras cannot trace {operators}: {_reason(error)}",
                hint=_OTHERWISE,
            ) from error
        for value, tensor in zip(results, tensors if len(results) > 1 else [tensors], strict=True):
            self.put(value, tensor)

    def _operations_layer(self, model: Model, name: str) -> Operations:
        trained = [name for name in model.graph.initializers if name in self.parameters]
        graph = base64.b64encode(model.to_proto().SerializeToString()).decode()
        return Operations(graph, trained, name=self._names.like(name))


_OTHERWISE = "convert to PyTorch: `onward.to_torch(model)`, or fix sizes: `onward set MODEL --shape NAME=1,64`"


def _reason(error: Exception) -> str:
    """Return the first line of an error that is not about the call, without the colors of Keras."""
    lines = re.sub(r"\x1b\[\d*m", "", str(error)).splitlines()
    return next((line for line in lines if line and not line.startswith("Exception encountered")), "")


def _make(node: ir.Node, make: Make) -> None:
    try:
        make()
    except Exception as error:  # of any backend
        raise UnsupportedError(
            f"Keras fails in `{node.op_type}` (node `{node.name}`): {_reason(error)}",
            hint=_OTHERWISE,
        ) from error


def _constants(node: ir.Node) -> list[ir.Value | None]:
    return [value for value in node.inputs if value is None or constant_tensor(value) is not None]
