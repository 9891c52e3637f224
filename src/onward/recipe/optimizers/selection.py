"""Optimizers as a recipe gives them: by name with options, or as a graph."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.errors import RecipeError
from onward.model import Model, load
from onward.recipe.optimizers.graph_optimizer import RATE, FunctionOptimizer
from onward.recipe.ranges import NOT_NEGATIVE
from onward.recipe.spec import Spec, check_options, parse
from onward.standard import IR_VERSION

Given = Spec | FunctionOptimizer

_DEFAULT_RATE = 1e-3
_OPTIONS = ("function", "lr", "initial", "name")


def given_optimizer(given: Any) -> Given:
    """What a recipe says of an optimizer.

    A graph is a model, a function or a file; with options it is `{"function": graph, "lr": 0.1, "initial": {"v": 1}}`.
    A model can say these itself, as defaults of its inputs.
    """
    if isinstance(given, FunctionOptimizer):
        return given
    if isinstance(given, Mapping) and "function" in given:
        check_options("an optimizer that is a function", given, dict.fromkeys(_OPTIONS))
        return _change_options(_open_function(given["function"]), given)
    return _open_function(given) if _is_graph(given) else parse(given)


def with_rate(given: Any, lr: float) -> Any:
    """The optimizer with a learning rate that was given beside it."""
    optimizer = given_optimizer(given)
    if isinstance(optimizer, FunctionOptimizer):
        return _change_options(optimizer, {RATE: lr})
    if RATE in optimizer.options:
        raise RecipeError(
            f"the learning rate is given twice: as {lr:g}, and in `{optimizer}`", hint="leave one of them out"
        )
    return Spec(optimizer.name, {RATE: lr, **optimizer.options})


def _is_graph(given: Any) -> bool:
    if isinstance(given, str):
        return given.endswith(".onnx")
    return isinstance(given, Model | ir.Function | os.PathLike | bytes) or hasattr(given, "SerializeToString")


def _open_function(source: Any) -> FunctionOptimizer:
    if isinstance(source, FunctionOptimizer):
        return source
    if isinstance(source, ir.Function) or type(source).__name__ == "FunctionProto":
        function = source.clone() if isinstance(source, ir.Function) else ir.from_proto(source)
        made = FunctionOptimizer(function.name, _as_model(function), _DEFAULT_RATE)
    else:
        model = load(source).copy()
        held = {name: value for name, value in model.graph.initializers.items() if value in model.graph.inputs}
        for name in held:
            model.graph.initializers.pop(name)
        defaults = {name: value.const_value.numpy() for name, value in held.items() if value.const_value is not None}
        lr = float(defaults.pop(RATE, np.asarray(_DEFAULT_RATE)))
        made = FunctionOptimizer(model.graph.name or "optimizer", model, lr, defaults)
    made.check()
    return made


def _as_model(function: ir.Function) -> Model:
    graph = function.graph
    imports = graph.opset_imports
    imports.update(function.opset_imports)
    return Model(ir.Model(graph, ir_version=IR_VERSION))


def _change_options(made: FunctionOptimizer, options: Mapping[str, Any]) -> FunctionOptimizer:
    initial = options.get("initial", {})
    check_options(f"the state of the optimizer `{made.name}`", initial, {value.name or "": 0 for value in made.state})
    try:
        lr = float(options.get(RATE, made.lr))
    except (TypeError, ValueError):
        raise RecipeError(f"`lr` of optimizer `{made.name}` is `{options[RATE]}`, which is not a number") from None
    NOT_NEGATIVE.check(f"`lr` of optimizer `{made.name}`", lr)
    arrays = {name: np.asarray(value) for name, value in initial.items()}
    name = str(options.get("name", made.name))
    return dataclasses.replace(made, name=name, lr=lr, initial={**made.initial, **arrays})
