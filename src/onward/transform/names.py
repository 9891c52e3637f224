"""Renaming values of a training model, everywhere that a name stands: graphs, Gradients, bindings, recorded facts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onward.arguments import checked
from onward.errors import InvalidModelError, UnknownNameError, near_or_first
from onward.model import Model, Source, load
from onward.model.core import Step, values
from onward.model.gradient_names import rename_in_gradients
from onward.model.serde import stamp
from onward.model.state import PARAMETER_KEY, with_tags


@checked()
def rename(model: Source, names: Mapping[str, str]) -> Model:
    """A copy in which values have new names. The optimizer state of a renamed parameter is renamed along with it.

        renamed = onward.transform.rename("training.onnx", {"fc2.weight": "head.weight"})

    - `model`: any model
    - `names`: old -> new
    """
    model = load(model).copy()
    known = {value.name: value for graph in _scopes(model) for value in values(graph) if value.name}
    missing = [name for name in names if name not in known]
    if missing:
        listed = ", ".join(f"`{name}`" for name in missing)
        raise UnknownNameError(f"there is no value {listed}", hint=near_or_first(missing[0], known))
    wanted = dict(names)
    for value in model.initializers():
        owner = value.const_value.metadata_props.get(PARAMETER_KEY) if value.const_value is not None else None
        if owner is not None and owner in wanted and value.name and value.name not in wanted:
            wanted[value.name] = value.name.replace(owner, wanted[owner])
    clashes = sorted({new for old, new in wanted.items() if new in known and new not in wanted})
    doubled = sorted({new for new in wanted.values() if list(wanted.values()).count(new) > 1})
    if clashes or doubled:
        name = (clashes or doubled)[0]
        raise InvalidModelError(f"`{name}` is already the name of another value", hint="choose another")
    _apply(model, wanted)
    return stamp(model)


@checked()
def add_prefix(model: Source, prefix: str) -> Model:
    """A copy in which every value and node, nested ones included, has `prefix` before its name.

        decoder = onward.transform.add_prefix("decoder.onnx", "decoder/")

    - `model`: any model
    - `prefix`: what goes before the names
    """
    model = load(model).copy()
    wanted = {v.name: prefix + v.name for graph in _scopes(model, nested=True) for v in values(graph) if v.name}
    _apply(model, wanted)
    for graph in _scopes(model, nested=True):
        for node in graph:
            node.name = prefix + node.name if node.name else node.name
    return stamp(model)


def replace_names(step: Step, names: Mapping[str, str]) -> None:
    """Change names where a step holds them as text: in Gradients, bindings and facts."""

    def new(name: str) -> str:
        return names.get(name, name)

    rename_in_gradients(step.algorithm, names)
    step.update = {new(key): new(value) for key, value in step.update.items()}
    step.reset = {new(key): value for key, value in step.reset.items()}
    for key in [key for key in step.metadata if key.startswith("train.")]:
        if (fact := step.fact(key)) is not None:
            step.metadata[key] = json.dumps(_rename_in_fact(fact, names))


def _apply(model: Model, wanted: Mapping[str, str]) -> None:
    named = dict.fromkeys(v for g in _scopes(model, nested=True) for v in (*values(g), *g.outputs))
    affected = [value for value in named if value.name in wanted]
    targets = [wanted[value.name] for value in affected if value.name]
    for i, value in enumerate(affected):  # by way of names that nobody has, so that two values can swap theirs
        value.name = f"onward:renaming:{i}"
    for value, name in zip(affected, targets, strict=True):
        value.name = name
        tensor = value.const_value
        owner = tensor.metadata_props.get(PARAMETER_KEY, "") if tensor is not None else ""
        if tensor is not None and owner in wanted:
            value.const_value = with_tags(tensor, param=wanted[owner])
    rename_in_gradients(model.graph, wanted)
    for step in model.steps:
        replace_names(step, wanted)


def _rename_in_fact(fact: Any, names: Mapping[str, str]) -> Any:
    """A JSON fact with every string that is an old name replaced, as a value and as a key."""
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
