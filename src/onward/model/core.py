"""`Model` and `Step`: an inference graph with its training steps.

Nodes of a step's algorithm read values of the inference graph directly, like the body of an `If`.
This is the specification's combined graph without a copy: renaming a weight renames it everywhere,
and a value knows all its readers.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from onward.arguments import checked
from onward.build import Names
from onward.errors import InvalidModelError, UnknownNameError, suggest_or_list
from onward.model.walk import graphs_in, nested_graphs
from onward.standard import ML_DOMAIN

TRAINING_DOMAIN = "ai.onnx.preview.training"


@dataclasses.dataclass(eq=False)
class Step:
    """One `TrainingInfoProto`: the computation of a step, and the state that it replaces."""

    algorithm: ir.Graph
    initialization: ir.Graph | None = None
    update: dict[str, str] = dataclasses.field(default_factory=dict)
    """State variable -> the output of `algorithm` that replaces it, all at once after a step."""
    reset: dict[str, str] = dataclasses.field(default_factory=dict)
    """State variable -> the output of `initialization` that holds its initial value."""
    rest: bytes = b""
    """Fields of the message that the schema does not know."""

    @property
    def metadata(self) -> dict[str, str]:
        return self.algorithm.metadata_props

    def fact(self, key: str) -> Any:
        """Return a JSON fact about the run, e.g. `train.optimizer`; None if malformed or missing."""
        try:
            return json.loads(self.metadata[key])
        except (KeyError, ValueError, RecursionError):
            return None

    def gradients(self) -> list[ir.Node]:
        """Return the `Gradient` nodes of the algorithm in order, with nested ones."""
        return [node for node in self.algorithm.all_nodes() if is_gradient(node)]

    def differentiated(self) -> list[str]:
        """Return the names in the `xs` of its Gradients, in order."""
        return list(dict.fromkeys(x for node in self.gradients() for x in strings(node, "xs")))


class Model:
    """An inference graph and its training steps. Reads and writes `ModelProto`."""

    def __init__(self, inference: ir.Model, steps: Iterable[Step] = (), path: Path | None = None):
        self.ir = inference
        self.steps = list(steps)
        self.path = path

    @property
    def graph(self) -> ir.Graph:
        return self.ir.graph

    @property
    def functions(self) -> dict[ir.OperatorIdentifier, ir.Function]:
        return self.ir.functions

    @property
    def metadata(self) -> dict[str, str]:
        return self.ir.metadata_props

    @property
    def opset(self) -> int:
        """Version of the standard operator set that the model imports."""
        return self.ir.opset_imports.get("", self.ir.opset_imports.get("ai.onnx", 1))

    @property
    def inputs(self) -> list[ir.Value]:
        """Graph inputs without a default value, which a caller must feed."""
        return [value for value in self.graph.inputs if value.name not in self.graph.initializers]

    @property
    def outputs(self) -> list[ir.Value]:
        return list(self.graph.outputs)

    @property
    def is_training_model(self) -> bool:
        return bool(self.steps)

    @checked()
    def step(self, index: int = 0) -> Step:
        if not -len(self.steps) <= index < len(self.steps):
            raise UnknownNameError(
                f"the model has no step {index} (steps: {len(self.steps)})",
                hint=f"count steps from 0 to {len(self.steps) - 1}"
                if self.steps
                else "make it a training model with `onward prepare` or `onward.prepare`",
            )
        return self.steps[index]

    def combined(self, index: int = 0, *, share_functions: bool = False) -> ir.Model:
        """Return the combined graph of step `index` as a separate model that shares the tensors.

        With `share_functions` it shares the functions, too: to change one, replace it by a copy first.
        """
        step = self.step(index)
        graph, algorithm = self.graph, step.algorithm
        by_name = {value.name: value for value in (*values(graph), *values(algorithm))}
        # An output of an algorithm may name a value of the inference graph.
        outputs = [by_name.get(value.name, value) for value in (*graph.outputs, *algorithm.outputs)]
        view = ir.GraphView(
            [*graph.inputs, *algorithm.inputs],
            list(dict.fromkeys(outputs)),
            nodes=[*graph, *algorithm],
            initializers=[*graph.initializers.values(), *algorithm.initializers.values()],
            opset_imports=dict(self.ir.opset_imports),
            name=algorithm.name or graph.name,
        )
        functions = [f if share_functions else _clone(f) for f in self.functions.values()]
        return ir.Model(_clone(view), ir_version=self.ir.ir_version, functions=functions)

    def initializers(self) -> Iterator[ir.Value]:
        """Return every initializer of the inference graph and of the algorithms."""
        yield from self.graph.initializers.values()
        for step in self.steps:
            yield from step.algorithm.initializers.values()

    @checked()
    def initializer(self, name: str, step: int = 0) -> ir.Value:
        """Return an initializer by name: of the inference graph, else of this step, else of another step."""
        steps = [self.step(step), *self.steps] if self.steps else []
        tables = [self.graph.initializers, *(each.algorithm.initializers for each in steps)]
        for initializers in tables:
            if name in initializers:
                return initializers[name]
        hint = suggest_or_list(name, list(itertools.chain.from_iterable(tables)))
        raise UnknownNameError(f"the model has no initializer `{name}`", hint=hint)

    def array(self, name: str, step: int = 0) -> np.ndarray:
        """Return the array of an initializer."""
        return require_tensor(self.initializer(name, step)).numpy()

    @checked()
    def set(self, name: str, array: Any, step: int = 0) -> None:
        """Set an initializer, such as a weight, to a value of the same type and shape."""
        value = self.initializer(name, step)
        old, new = require_tensor(value), np.asarray(array)
        if tuple(new.shape) != tuple(old.shape):
            raise InvalidModelError(
                f"`{name}` has shape {list(old.shape)}, not {list(new.shape)}",
                hint=f"pass an array of shape {list(old.shape)}",
            )
        tensor = ir.Tensor(_convert(name, new, old.dtype), dtype=old.dtype, name=name, doc_string=old.doc_string)
        tensor.metadata_props.update(old.metadata_props)
        value.const_value = tensor

    def copy(self, *, steps: bool = True) -> Model:
        """Return an independent copy, optionally without steps. Immutable tensors are shared."""
        graph = _clone(self.graph)
        inference = ir.Model(
            graph,
            ir_version=self.ir.ir_version,
            producer_name=self.ir.producer_name,
            producer_version=self.ir.producer_version,
            domain=self.ir.domain,
            model_version=self.ir.model_version,
            doc_string=self.ir.doc_string,
            functions=[_clone(function) for function in self.functions.values()],
            metadata_props=dict(self.metadata),
            device_configurations=self.ir.device_configurations,
        )
        inference.meta.update(self.ir.meta)
        if not steps or not self.steps:
            return Model(inference, path=self.path)
        moved = dict(zip(values(self.graph), values(graph), strict=True))
        return Model(inference, [_copy_step(step, moved) for step in self.steps], self.path)

    def names(self) -> Names:
        """Return the names of all values and nodes, to generate fresh ones."""
        graphs = [self.graph, *(step.algorithm for step in self.steps)]
        names = Names(name for graph in graphs for name in all_names(graph))
        names.take(node.name for graph in graphs for inner in graphs_in(graph) for node in inner if node.name)
        return names

    def to_proto(self) -> Any:
        """Return the model as an `onnx.ModelProto`; external data stays in its files."""
        from onward.model.serde import to_proto

        return to_proto(self)

    @checked()
    def save(
        self, path: str | os.PathLike[str], *, data: Literal["auto", "overlay", "none", "data", "safetensors"] = "auto"
    ) -> Path:
        """Write the model, all or nothing: a crash or a full disk leaves the old file.

        `data` says where tensors go: "none" (into the model file), "data" (into a `.data` file beside
        it), "safetensors" (into a `.safetensors` file beside it) or "auto" (as before; beside the
        file if they are too large). With "auto", tensors in files in the folder of `path` or below
        stay there, and others are copied. "overlay" is "auto" without copies: it raises instead.
        """
        from onward.model.serde import save

        return save(self, path, data)

    def __repr__(self) -> str:
        name = self.path.name if self.path else self.graph.name or "model"
        return f"<onward.Model {name}: {len(self.graph)} nodes, {len(self.steps)} training step(s)>"


def _convert(name: str, array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """Convert an array to the type of a tensor. Rounds only to floats; raises on overflow."""
    if array.dtype == dtype.numpy():
        return array
    name_of_type = dtype.name.lower()
    if array.dtype.kind in "OSUmM" or (array.dtype.kind == "b") != (dtype == ir.DataType.BOOL):
        raise InvalidModelError(f"`{name}` is {name_of_type}, not {array.dtype}", hint=f"pass {name_of_type} values")
    with np.errstate(all="ignore"):
        converted = array.astype(dtype.numpy())
    if dtype.is_integer() and not (converted == array).all():
        message = f"`{name}` is {name_of_type}, which cannot hold {array}"
        raise InvalidModelError(message, hint=f"pass integers in the range of {name_of_type}")
    return converted


def is_gradient(node: ir.Node) -> bool:
    """True if a node is the standard's `Gradient`."""
    return (node.domain, node.op_type) == (TRAINING_DOMAIN, "Gradient")


def strings(node: ir.Node, attribute: str) -> tuple[str, ...]:
    """Return a list-of-strings attribute; empty if absent or of another type."""
    attr = node.attributes.get(attribute)
    if attr is None or attr.is_ref() or attr.type != ir.AttributeType.STRINGS:
        return ()
    return tuple(attr.as_strings())


def string(node: ir.Node, attribute: str) -> str:
    """Return a string attribute; empty if absent or of another type."""
    attr = node.attributes.get(attribute)
    if attr is None or attr.is_ref() or attr.type != ir.AttributeType.STRING or not isinstance(attr.value, str):
        return ""
    return attr.value


def values(graph: ir.Graph) -> list[ir.Value]:
    """Return the values that a graph defines, in order: inputs, initializers, node outputs."""
    candidates = [*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)]
    return list(dict.fromkeys(candidates))


def require_tensor(value: ir.Value) -> ir.TensorProtocol:
    """Return the tensor of an initializer."""
    assert value.const_value is not None, value.name
    return value.const_value


def as_input(graph: ir.Graph, name: str) -> ir.TensorProtocol:
    """Convert an initializer to an input; return its tensor."""
    value = graph.initializers.pop(name)
    tensor = require_tensor(value)
    value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
    value.const_value = None
    if not value.is_graph_input():
        graph.inputs.append(value)
    return tensor


def all_names(graph: ir.Graph) -> Iterator[str]:
    """Return the names of all values of a graph and of its nested graphs."""
    for inner in graphs_in(graph):
        yield from (value.name for value in values(inner) if value.name)


def _clone(graph: Any, **options: Any) -> Any:
    try:
        return graph.clone(**options)
    except (RuntimeError, ValueError, TypeError) as error:
        raise InvalidModelError(_unreadable(graph), hint="`onward check MODEL` lists all faults") from error


def _unreadable(graph: Any) -> str:
    """Return a message that names the value which a graph reads and cannot see."""
    ready = {*graph.inputs, *(getattr(graph, "initializers", None) or {}).values()}
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in ready:
                when = "is computed only later" if value.producer() is not None else "does not exist"
                return f"the node `{node.name or node.op_type}` reads `{value.name}`, which {when}"
        ready.update(node.outputs)
    missing = [value for value in graph.outputs if value not in ready]
    if missing:
        return f"nothing computes the output `{missing[0].name}`"
    return f"`{graph.name or ''}` reads a value before it is computed, or one that does not exist"


def _copied_algorithm(algorithm: ir.Graph) -> ir.Graph:
    """Copy an algorithm. Outputs that are values of the inference graph become names only."""
    own, outputs = set(values(algorithm)), list(algorithm.outputs)
    foreign = {i: value for i, value in enumerate(outputs) if value not in own}
    algorithm.outputs[:] = [value for value in outputs if value in own]
    try:
        copy: ir.Graph = _clone(algorithm, allow_outer_scope_values=True)
    finally:
        algorithm.outputs[:] = outputs
    for i, value in foreign.items():
        copy.outputs.insert(i, ir.Value(name=value.name, type=value.type, shape=value.shape))
    return copy


def _copy_step(step: Step, moved: dict[ir.Value, ir.Value]) -> Step:
    """Copy a step for a copy of the inference graph, whose values `moved` has for the old ones."""
    algorithm = _copied_algorithm(step.algorithm)
    for node in algorithm.all_nodes():
        for i, value in enumerate(node.inputs):
            if value in moved:
                node.replace_input_with(i, moved[value])
    initialization = _clone(step.initialization) if step.initialization is not None else None
    return Step(algorithm, initialization, dict(step.update), dict(step.reset), step.rest)


def tensor_of(value: ir.Value) -> ir.Value:
    """Return the value, or the tensor behind a list of maps from labels."""
    node = value.producer()
    is_map = node is not None and (node.domain, node.op_type) == (ML_DOMAIN, "ZipMap")
    return node.inputs[0] if is_map and node.inputs[0] is not None else value  # type: ignore[union-attr]


# ---- names in Gradient nodes -----------------------------------------------------------------------------------------

# A Gradient names values in attributes. In a function these are its own values, in a nested graph also those of
# the graphs around it. Text does not follow a value that is renamed or moved. So while graphs are rewritten,
# `link_gradients` makes the named values inputs of the Gradient, which are copied and replaced like others.

_LINKED = "onward.linked"
"""Attribute of a linked Gradient: the index of the first named value among its inputs."""


def gradients_in(graph: ir.Graph, around: Sequence[ir.Graph] = ()) -> Iterator[tuple[ir.Node, tuple[ir.Graph, ...]]]:
    """Return every Gradient, nested ones too, with its scope; none needs a later one."""
    scope = (*around, graph)
    for node in graph:
        for inner in nested_graphs(node):
            yield from gradients_in(inner, scope)
        if is_gradient(node):
            yield node, scope


def visible(scope: Sequence[ir.Graph]) -> dict[str, ir.Value]:
    """Return the values of `scope` by name; each graph in it is nested in the one before."""
    return {value.name: value for graph in scope for value in values(graph) if value.name}


def names_of(node: ir.Node) -> tuple[str, ...]:
    """Return the names in a Gradient: `xs`, `zs` and `y`."""
    return (*strings(node, "xs"), *strings(node, "zs"), string(node, "y"))


def link_gradients(graph: ir.Graph, around: Sequence[ir.Graph] = ()) -> None:
    """Append the values that Gradients name to their inputs; unknown names stay attributes only."""
    for node, scope in list(gradients_in(graph, around)):
        by_name = visible(scope)
        if _LINKED not in node.attributes and all(name in by_name for name in names_of(node)):
            start = append_inputs(node, [by_name[name] for name in names_of(node)])
            node.attributes[_LINKED] = ir.AttrInt64(_LINKED, start)


def link_function_gradients(function: ir.Function) -> None:
    """Append the values that Gradients of a function name to their inputs, which are independent."""
    graph = function.graph
    named = {name for node, _ in gradients_in(graph) for name in names_of(node)}
    for value in [value for value in graph.inputs if value.name in named]:
        own = ir.Node("", "Identity", [value])
        value.replace_all_uses_with(own.outputs[0])
        own.replace_input_with(0, value)
        own.outputs[0].name, own.outputs[0].type, own.outputs[0].shape = f"{value.name}/own", value.type, value.shape
        graph.insert_before(graph[0], own)
        rename_in_gradients(graph, {value.name or "": own.outputs[0].name})
    link_gradients(graph)


def append_inputs(node: ir.Node, more: Sequence[ir.Value]) -> int:
    """Append inputs to a node; return the index of the first one."""
    start = len(node.inputs)
    node.resize_inputs(start + len(more))
    for i, value in enumerate(more, start):
        node.replace_input_with(i, value)
    return start


def unlink_gradients(graph: ir.Graph) -> None:
    """Write the names of the values behind Gradients back to their attributes."""
    for node in graph.all_nodes():
        if _LINKED in node.attributes:
            start = node.attributes.pop(_LINKED).as_int()
            linked = zip(names_of(node), node.inputs[start:], strict=True)
            _rename(node, {name: value.name or "" for name, value in linked if value})
            node.resize_inputs(start)


def rename_in_gradients(graph: ir.Graph, names: Mapping[str, str]) -> None:
    """Rename values in the Gradients of a graph."""
    for node in graph.all_nodes():
        if is_gradient(node):
            _rename(node, names)


def _rename(node: ir.Node, names: Mapping[str, str]) -> None:
    for key in ("xs", "zs"):
        if old := strings(node, key):
            node.attributes[key] = ir.AttrStrings(key, [names.get(name, name) for name in old])
    if y := string(node, "y"):
        node.attributes["y"] = ir.AttrString("y", names.get(y, y))
