"""Join two models with their training, and rename values everywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onward.arguments import checked
from onward.errors import InvalidModelError, UnknownNameError, suggest
from onward.model import Model, Source, load
from onward.model.core import Step, rename_in_gradients, values
from onward.model.serde import stamp
from onward.model.state import PARAMETER_KEY, with_tags
from onward.transform.context import values_by_name
from onward.transform.opset import convert_opset


@checked()
def merge(first: Source, second: Source, connect: Mapping[str, str] | None = None, *, prefix: str = "") -> Model:
    """Return one model that runs `first` and then `second`, with the training steps of both.

        both = onward.transform.merge("encoder.onnx", "decoder.onnx", {"code": "z"}, prefix="decoder/")

    - `first`, `second`: the models; outputs of `first` that are not connected stay outputs
    - `connect`: output of `first` -> input of `second` (default: all in order, if their numbers are equal)
    - `prefix`: prefix of all names of `second`, for models that share names
    """
    first, second = load(first), load(second)
    opset = max(first.opset, second.opset)
    first, second = convert_opset(first, opset).copy(), convert_opset(second, opset).copy()
    if prefix:
        second = add_prefix(second, prefix)
        connect = connect and {output: prefix + name for output, name in connect.items()}
    joins = _joins(first, second, connect)
    _check_names(first, second, set(joins.values()))
    for output, name in joins.items():
        source = next(value for value in first.graph.outputs if value.name == output)
        target = next(value for value in second.graph.inputs if value.name == name)
        if source.dtype is not None and target.dtype is not None and source.dtype != target.dtype:
            dtypes = source.dtype.name.lower(), target.dtype.name.lower()
            raise InvalidModelError(f"output `{output}` is {dtypes[0]}, but input `{name}` is {dtypes[1]}")
        target.replace_all_uses_with(source, replace_graph_outputs=True)
        second.graph.inputs.remove(target)
        rename_in_gradients(second.graph, {name: output})
        for step in second.steps:
            replace_names(step, {name: output})
    _move(first, second, set(joins))
    _check_functions(first, second)
    first.functions.update(second.functions)
    first.ir.ir_version = max(first.ir.ir_version or 0, second.ir.ir_version or 0)
    for domain, version in second.ir.opset_imports.items():
        if first.ir.opset_imports.setdefault(domain, version) != version:
            raise InvalidModelError(f"the models import different versions of the operator set `{domain}`")
    for key, value in second.metadata.items():
        if first.metadata.setdefault(key, value) != value:
            first.metadata[f"{second.graph.name or 'second'}.{key}"] = value
    first.steps += second.steps
    first.path = None
    return stamp(first)


def _joins(first: Model, second: Model, connect: Mapping[str, str] | None) -> dict[str, str]:
    outputs = [value.name or "" for value in first.outputs]
    inputs = [value.name or "" for value in second.inputs]
    if connect is None:
        if len(outputs) != len(inputs):
            raise InvalidModelError(
                f"cannot connect {len(outputs)} outputs ({', '.join(outputs)}) to {len(inputs)} inputs "
                f"({', '.join(inputs)}) in order",
                hint="name the pairs: `connect={'output': 'input'}` (`--connect output=input`)",
            )
        return dict(zip(outputs, inputs, strict=True))
    for name, candidates, role in (
        *((n, outputs, "the first model has no output") for n in connect),
        *((n, inputs, "the second model has no input") for n in connect.values()),
    ):
        if name not in candidates:
            hint = suggest(name, candidates) or f"there are {', '.join(candidates)}"
            raise UnknownNameError(f"{role} `{name}`", hint=hint)
    by_input: dict[str, str] = {}
    for output, name in connect.items():
        if name in by_input:
            raise InvalidModelError(
                f"`{by_input[name]}` and `{output}` are both connected to `{name}`", hint="connect one of them"
            )
        by_input[name] = output
    return dict(connect)


def _check_names(first: Model, second: Model, connected: set[str]) -> None:
    names = [
        {value.name for graph in (model.graph, *(step.algorithm for step in model.steps)) for value in values(graph)}
        for model in (first, second)
    ]
    shared = sorted(name for name in names[0] & (names[1] - connected) if name)
    if shared:
        listed = ", ".join(f"`{name}`" for name in shared[:5]) + (", ..." if len(shared) > 5 else "")
        raise InvalidModelError(
            f"both models have values named {listed}", hint="give `prefix='second/'` (`--prefix second/`)"
        )


def _move(first: Model, second: Model, connected: set[str]) -> None:
    """Move inputs, weights and nodes of `second` into the graph of `first`."""
    graph, other = first.graph, second.graph
    unconnected = [value for value in graph.outputs if value.name not in connected]
    outputs, inputs = list(other.outputs), list(other.inputs)
    initializers, nodes = list(other.initializers.values()), list(other)
    other.outputs.clear()
    other.inputs.clear()
    other.initializers.clear()
    other.remove(nodes)
    graph.inputs.extend(inputs)
    for value in initializers:
        graph.register_initializer(value)
    graph.extend(nodes)
    graph.outputs.clear()
    graph.outputs.extend([*unconnected, *outputs])


def _check_functions(first: Model, second: Model) -> None:
    for identifier in first.functions.keys() & second.functions.keys():
        ours, theirs = first.functions[identifier], second.functions[identifier]
        if ir.to_proto(ours) != ir.to_proto(theirs):
            raise InvalidModelError(
                f"both models define the function `{identifier[0]}.{identifier[1]}`, with different bodies",
                hint="inline the functions of one first: `onward inline MODEL -o plain.onnx`",
            )


# ---- names -----------------------------------------------------------------------------------------------------------


@checked()
def rename(model: Source, names: Mapping[str, str]) -> Model:
    """Return a copy in which values have new names. Optimizer state is renamed with its parameter.

        renamed = onward.transform.rename("training.onnx", {"fc2.weight": "head.weight"})

    - `model`: any model
    - `names`: old -> new
    """
    model = load(model).copy()
    by_name = values_by_name(_scopes(model), names)
    new_names = dict(names)
    for value in model.initializers():
        owner = value.const_value.metadata_props.get(PARAMETER_KEY) if value.const_value is not None else None
        if owner is not None and owner in new_names and value.name and value.name not in new_names:
            new_names[value.name] = value.name.replace(owner, new_names[owner])
    clashes = sorted({new for old, new in new_names.items() if new in by_name and new not in new_names})
    doubled = sorted({new for new in new_names.values() if list(new_names.values()).count(new) > 1})
    if clashes or doubled:
        name = (clashes or doubled)[0]
        raise InvalidModelError(f"`{name}` is already the name of another value", hint="choose another name")
    _rename_all(model, new_names)
    return stamp(model)


@checked()
def add_prefix(model: Source, prefix: str) -> Model:
    """Return a copy in which every value and node, also nested ones, has a prefix before its name.

        decoder = onward.transform.add_prefix("decoder.onnx", "decoder/")

    - `model`: any model
    - `prefix`: the prefix
    """
    model = load(model).copy()
    new_names = {v.name: prefix + v.name for graph in _scopes(model, nested=True) for v in values(graph) if v.name}
    _rename_all(model, new_names)
    for graph in _scopes(model, nested=True):
        for node in graph:
            node.name = prefix + node.name if node.name else node.name
    return stamp(model)


def replace_names(step: Step, names: Mapping[str, str]) -> None:
    """Change names in the strings of a step: in Gradients, bindings and facts."""

    def new(name: str) -> str:
        return names.get(name, name)

    rename_in_gradients(step.algorithm, names)
    step.update = {new(key): new(value) for key, value in step.update.items()}
    step.reset = {new(key): value for key, value in step.reset.items()}
    for key in [key for key in step.metadata if key.startswith("train.")]:
        if (fact := step.fact(key)) is not None:
            step.metadata[key] = json.dumps(_rename_in_fact(fact, names))


def _rename_all(model: Model, new_names: Mapping[str, str]) -> None:
    named = dict.fromkeys(v for g in _scopes(model, nested=True) for v in (*values(g), *g.outputs))
    affected = [value for value in named if value.name in new_names]
    targets = [new_names[value.name] for value in affected if value.name]
    for i, value in enumerate(affected):  # temporary names, so that two values can swap theirs
        value.name = f"onward:renaming:{i}"
    for value, name in zip(affected, targets, strict=True):
        value.name = name
        tensor = value.const_value
        owner = tensor.metadata_props.get(PARAMETER_KEY, "") if tensor is not None else ""
        if tensor is not None and owner in new_names:
            value.const_value = with_tags(tensor, param=new_names[owner])
    rename_in_gradients(model.graph, new_names)
    for step in model.steps:
        replace_names(step, new_names)


def _rename_in_fact(fact: Any, names: Mapping[str, str]) -> Any:
    """Return a JSON fact with old names replaced, in values and keys."""
    if isinstance(fact, str):
        return names.get(fact, fact)
    if isinstance(fact, list):
        return [_rename_in_fact(item, names) for item in fact]
    if isinstance(fact, dict):
        return {names.get(key, key): _rename_in_fact(item, names) for key, item in fact.items()}
    return fact


def _scopes(model: Model, nested: bool = False) -> list[ir.Graph]:
    graphs = [model.graph, *(step.algorithm for step in model.steps)]
    return [g for graph in graphs for g in (graph, *(graph.subgraphs() if nested else ()))]
