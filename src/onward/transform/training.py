"""Removal of training and of unused nodes from a model, and return of training after another tool changed the graph."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import onnx_ir as ir

from onward.arguments import checked
from onward.errors import InvalidModelError
from onward.model import Model, Source, load
from onward.model.core import link_gradients, unlink_gradients, values
from onward.model.serde import stamp
from onward.model.walk import ancestors, nested_nodes
from onward.standard import ML_DOMAIN
from onward.transform.bodies import return_to_bodies
from onward.transform.opset import convert_opset
from onward.transform.quantized import store_as_integers

FIXED_KEY = "train.fixed"
"""Metadata of a BatchNormalization that keeps its statistics in training."""


@checked()
def strip(model: Source) -> Model:
    """Return a copy without training: the inference graph and its weights.

        plain = onward.transform.strip("training.onnx")

    Weights that the model stored as integers, or in bodies, are stored so again. Inputs and outputs
    are those of the file before `batch_axis` and `constants`.

    - `model`: any model
    """
    model = without_steps(model)
    store_as_integers(model)
    return_to_bodies(model)
    restore_linear_models(model)
    for node in model.graph:
        node.metadata_props.pop(FIXED_KEY, None)
    restore_interface(model)
    return model


def without_steps(source: Source) -> Model:
    """Return a copy without training, in the form in which it is trained."""
    source = load(source)
    model = source.copy(steps=False)
    for key in [key for key in model.metadata if key.startswith("train.")]:
        del model.metadata[key]
    if source.is_training_model:
        model.metadata.pop("onward.preprocess", None)  # its graph has the operations
    drop_unused_definitions(model)
    return model


def drop_unused_definitions(model: Model) -> None:
    """Remove unused functions and imports of operator sets, in place."""
    used: set[ir.OperatorIdentifier] = set()
    graphs = [model.graph, *(graph for step in model.steps for graph in (step.algorithm, step.initialization) if graph)]
    pending = [node.op_identifier() for graph in graphs for node in graph.all_nodes()]
    while pending:
        identifier = pending.pop()
        if identifier not in used:
            used.add(identifier)
            if function := model.functions.get(identifier):
                pending += [node.op_identifier() for node in function.all_nodes()]
    for identifier in [identifier for identifier in model.functions if identifier not in used]:
        del model.functions[identifier]
    domains = {"", *(domain for domain, _, _ in used)}
    for domain in [domain for domain in model.ir.opset_imports if domain not in domains and domain != "ai.onnx"]:
        del model.ir.opset_imports[domain]


@checked()
def refresh(changed: Source, training: Source) -> Model:
    """Return the inference graph of `changed` with the training that `training` has for an earlier form.

        again = onward.transform.refresh("quantized.onnx", "training.onnx")

    Training refers to the inference graph by name. Names that are missing, or have another type or
    shape, are reported all at once.

    - `changed`: the model that lost its training, or has an older one
    - `training`: the training model
    """
    changed, training = load(changed), load(training)
    if not training.steps:
        raise InvalidModelError(
            "the second model has no training", hint="run `onward prepare MODEL` on the changed model"
        )
    result, source = strip(changed), convert_opset(training, changed.opset).copy()
    new = {value.name: value for value in values(result.graph)}
    problems = [problem for value in _read_by_training(source) if (problem := _mismatch(value, new.get(value.name)))]
    if problems:
        recipe = any("train.recipe" in step.metadata for step in training.steps)
        raise InvalidModelError(
            "the training no longer matches the inference graph:\n" + "\n".join(f"  {line}" for line in problems),
            hint="prepare the changed model again"
            + (" with the recipe in the file: `onward show MODEL`" if recipe else ""),
        )
    old = {value: new[value.name] for value in values(source.graph) if value.name in new}
    for step in source.steps:
        for node in step.algorithm.all_nodes():
            for i, value in enumerate(node.inputs):
                if value in old:
                    node.replace_input_with(i, old[value])
    result.steps = source.steps
    result.functions.update({k: f.clone() for k, f in source.functions.items() if k not in result.functions})
    for domain, version in source.ir.opset_imports.items():
        result.ir.opset_imports.setdefault(domain, version)
    result.ir.ir_version = max(result.ir.ir_version or 0, source.ir.ir_version or 0)
    drop_unused_definitions(result)
    return stamp(result)


def _read_by_training(model: Model) -> Iterator[ir.Value]:
    """Yield the values of the inference graph that training reads, differentiates or updates."""
    by_name = {value.name: value for value in values(model.graph)}
    result: dict[ir.Value, None] = {}
    for step in model.steps:
        for node in step.algorithm.all_nodes():
            result.update((v, None) for v in node.inputs if v is not None and by_name.get(v.name) is v)
        result.update((by_name[name], None) for name in (*step.update, *step.differentiated()) if name in by_name)
    yield from result


def _mismatch(old: ir.Value, new: ir.Value | None) -> str | None:
    if new is None:
        return f"`{old.name}` is gone"
    if old.is_initializer() and not new.is_initializer():
        return f"`{old.name}` is no longer an initializer"
    if old.dtype is not None and new.dtype is not None and old.dtype != new.dtype:
        return f"`{old.name}` was {old.dtype.name.lower()}, and is {new.dtype.name.lower()}"
    if old.shape is not None and new.shape is not None and not _compatible(old.shape, new.shape):
        return f"`{old.name}` had shape {old.shape}, and has {new.shape}"
    return None


def _compatible(old: ir.Shape, new: ir.Shape) -> bool:
    if len(old) != len(new):
        return False
    return all(a == b or not isinstance(a, int) or not isinstance(b, int) for a, b in zip(old, new, strict=True))


# ---- inputs and outputs ----------------------------------------------------------------------------------------------


INTERFACE_KEY = "train.interface"
"""Metadata of a node that moves samples to axis 0 or replaces an input: name and shape in the file as JSON."""


def restore_interface(model: Model) -> None:
    """Restore inputs and outputs that were changed for data, in place."""
    graph = model.graph
    inputs: list[tuple[int, ir.Value]] = []
    ends = [node for node in graph if INTERFACE_KEY in node.metadata_props]
    for node in ends:
        fact = json.loads(node.metadata_props[INTERFACE_KEY])
        name, value, inner = fact["name"], node.outputs[0], node.inputs[0]
        shape = None if fact["shape"] is None else ir.Shape(fact["shape"])
        if "input" in fact:
            restored = ir.Value(name=name, type=value.type, shape=shape)
            value.replace_all_uses_with(restored, replace_graph_outputs=True)
            inputs.append((fact["input"], restored))
        elif value.is_graph_output() and inner is not None:
            graph.outputs[graph.outputs.index(value)] = inner
            value.name, inner.name, inner.shape = None, name, shape
    if ends:
        remove_unused(graph)
    names = {value.name for _, value in inputs}
    for value in [value for value in graph.inputs if value.name in names]:
        graph.inputs.remove(value)
    for position, value in sorted(inputs, key=lambda row: row[0]):
        graph.inputs.insert(position, value)


# ---- linear models of ai.onnx.ml -------------------------------------------------------------------------------------


# Linear models of `ai.onnx.ml` have their weights as attributes. For training, they become a Gemm with initializers,
# whose metadata describes the operator, so that the same node comes back with other numbers.

ORIGIN_KEY = "train.linear"
"""Metadata of a Gemm: its operator as JSON, with name, shape of coefficients, other attributes."""
PART_KEY = "train.linear.part"
"""Metadata of nodes around it: `x` before its input, or the index of the output that they compute."""


def restore_linear_models(model: Model) -> None:
    """Restore operators from their Gemms, in place; those that were changed stay open."""
    opened = [node for node in model.graph if ORIGIN_KEY in node.metadata_props]
    for gemm in opened:
        origin, stored = json.loads(gemm.metadata_props[ORIGIN_KEY]), [v for v in gemm.inputs[1:] if v is not None]
        arrays = [value.const_value.numpy() for value in stored if value.const_value is not None]
        outputs = dict(_outputs(gemm))
        if len(arrays) < len(stored) or list(arrays[0].shape) != origin["shape"] or len(outputs) < origin["outputs"]:
            continue
        _replace(gemm, origin, [array.ravel().tolist() for array in arrays], outputs)
        model.ir.opset_imports[ML_DOMAIN] = origin["version"]
        remove_unused(model.graph)
        for value in stored:
            if not value.uses() and not value.is_graph_output():
                model.graph.initializers.pop(value.name or "", None)


def _replace(gemm: ir.Node, origin: dict[str, Any], numbers: list[list[float]], outputs: dict[int, ir.Value]) -> None:
    weights = dict(zip(("coefficients", "intercepts"), numbers, strict=False))
    attributes = ir.convenience.convert_attributes({**origin["attributes"], **weights})
    node = ir.Node(ML_DOMAIN, origin["operator"], [_entry(gemm)], attributes, num_outputs=len(outputs))
    node.name = origin["name"]
    gemm.append(node)
    for index, old in outputs.items():
        new, name, old.name = node.outputs[index], old.name, None
        new.type, new.shape = old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name = name


def _outputs(gemm: ir.Node) -> Iterator[tuple[int, ir.Value]]:
    """Yield index and value of the outputs of the operator, computed from the Gemm."""
    pending, seen = [gemm], {gemm}
    while pending:
        node = pending.pop()
        label = node.metadata_props.get(PART_KEY, "")
        if label.isdecimal():
            yield int(label), node.outputs[0]
        if node is gemm or not (label or ORIGIN_KEY in node.metadata_props):
            fresh = [reader for output in node.outputs for reader in output.consumers() if reader not in seen]
            seen.update(fresh)
            pending += fresh


def _entry(gemm: ir.Node) -> ir.Value | None:
    value = gemm.inputs[0]
    while value is not None and (node := value.producer()) is not None and node.metadata_props.get(PART_KEY) == "x":
        value = node.inputs[0]
    return value


# ---- what nothing reads ----------------------------------------------------------------------------------------------


def remove_unused(graph: ir.Graph) -> ir.Graph:
    """Drop the nodes whose results nothing reads, in place; return the graph."""
    unused: list[ir.Node] = []
    dead: set[ir.Node] = set()
    for node in reversed(graph):
        if not any(output.is_graph_output() or not dead.issuperset(output.consumers()) for output in node.outputs):
            unused.append(node)
            dead.update([node], nested_nodes(node))
    if unused:
        remove(graph, unused)  # all at once: each removal looks at all outputs of the graph
    return graph


def keep_only(model: Model, outputs: Iterable[ir.Value]) -> None:
    """Make these the outputs, and drop nodes and inputs that they do not need, in place."""
    graph, results = model.graph, list(outputs)
    link_gradients(graph)  # a Gradient needs the values that it names
    needed, values_read = ancestors(results)
    graph.outputs.clear()
    remove(graph, [node for node in graph if node not in needed])
    graph.outputs.extend(results)
    for value in [value for value in graph.inputs if value not in values_read]:
        graph.inputs.remove(value)
    for name in [name for name, value in graph.initializers.items() if value not in values_read]:
        del graph.initializers[name]
    unlink_gradients(graph)


def remove(graph: ir.Graph, nodes: Collection[ir.Node]) -> None:
    """Drop nodes that nothing else reads, and the reads of graphs nested in them."""
    for node in nodes:
        for inner in list(nested_nodes(node)):
            for i in range(len(inner.inputs)):
                inner.replace_input_with(i, None)
    graph.remove(nodes, safe=True)
