"""Optimizers as graphs by other tools: from gradients and state to new parameters and state.

The names of the inputs distinguish two kinds:

- for one parameter `x` with its gradient `g`; it is called for each parameter;
- for several parameters at once, which may depend on one another (a global norm): inputs by name,
  with gradients `NAME/grad`.

`lr` is the learning rate (float64), `t` counts updates, this one included (int64). Other inputs are
state: `NAME/SLOT` of a parameter (`SLOT` for a single `x`), others of the group. Outputs are the
new parameters, then the new state, in the order of the inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Names
from onward.errors import RecipeError, list_names
from onward.model import Model, load
from onward.model.core import values
from onward.model.walk import graphs_in
from onward.recipe.spec import NOT_NEGATIVE, check_options, checked_number
from onward.recipe.step_builder import take_apart
from onward.standard import IR_VERSION
from onward.transform.inline import inline
from onward.transform.opset import convert_opset

RATE, COUNT, GRADIENT = "lr", "t", "grad"
DOMAIN = "onward.optimizers"
"""Domain of the functions of such optimizers in a training model."""
_ONE = ("x", "g")


@dataclasses.dataclass(frozen=True)
class FunctionOptimizer:
    """An optimizer that is a graph, with its learning rate and initial state."""

    name: str
    update: Model
    lr: float
    initial: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Initial state by input (default: zero); a single number fills a tensor."""

    @property
    def values(self) -> dict[str, float]:
        return {RATE: self.lr}

    @property
    def inputs(self) -> list[ir.Value]:
        return list(self.update.graph.inputs)

    @property
    def is_for_one(self) -> bool:
        return set(_ONE) <= {value.name for value in self.inputs}

    @property
    def parameters(self) -> list[str]:
        """Parameters by the names of its inputs."""
        names = [value.name or "" for value in self.inputs]
        return ["x"] if self.is_for_one else [name for name in names if gradient_of(name) in names]

    @property
    def state(self) -> list[ir.Value]:
        """Inputs that are state."""
        gradients = ["g"] if self.is_for_one else map(gradient_of, self.parameters)
        others = {RATE, COUNT, *self.parameters, *gradients}
        return [value for value in self.inputs if value.name not in others]

    def check(self) -> None:
        """Raise if the graph updates nothing, or has a state without a new value."""
        if not self.parameters:
            raise RecipeError(
                f"the optimizer `{self.name}` has no parameters among its inputs",
                hint="name inputs `x` and `g`; for several parameters, `NAME` and `NAME/grad`",
            )
        expected, actual = len(self.parameters) + len(self.state), len(self.update.graph.outputs)
        if expected != actual:
            raise RecipeError(
                f"the optimizer `{self.name}` has {actual} outputs, but {len(self.parameters)} parameters and "
                f"{len(self.state)} tensors of state",
                hint="return the new parameters, then the new state, in the order of the inputs",
            )

    def bind(self, targets: Mapping[str, ir.Value]) -> FunctionOptimizer:
        """Return the optimizer for a whole group; `targets` are the tensors to update."""
        bound = _for_each(self, targets) if self.is_for_one else self
        missing = [name for name in targets if name not in bound.parameters]
        others = [name for name in bound.parameters if name not in targets]
        if missing or others:
            what = f"does not update {list_names(missing, 3)}" if missing else f"is for {list_names(others, 3)}, too"
            raise RecipeError(
                f"the optimizer `{self.name}` {what}",
                hint="select its parameters, and no others, with `groups` or `trainable`",
            )
        return bound

    def owner_of(self, state: str) -> str | None:
        """Return the parameter of a state; None for state of the whole group."""
        return max((name for name in self.parameters if state.startswith(f"{name}/")), key=len, default=None)

    def with_names(self, parameters: Mapping[str, str]) -> FunctionOptimizer:
        """Return the optimizer with other parameter names."""
        names = {name: parameters.get(name, name) for name in self.parameters}
        names |= {gradient_of(name): gradient_of(new) for name, new in names.items()}
        for value in self.state:
            state = value.name or ""
            owner = self.owner_of(state)
            names[state] = state if owner is None else f"{names[owner]}/{state.removeprefix(f'{owner}/')}"
        update = self.update.copy()
        name_inputs(update, [names.get(value.name or "", value.name or "") for value in update.graph.inputs])
        initial = {names[name]: array for name, array in self.initial.items()}
        return dataclasses.replace(self, update=update, initial=initial)

    def define(self, functions: dict[ir.OperatorIdentifier, ir.Function], opset: int) -> ir.Function:
        """Add the graph and the functions that it calls to a model, under a free name."""
        update = convert_opset(self.update, opset)
        others = [
            f"{domain}.{name}" for (domain, name, _), called in update.functions.items() if _clashes(called, functions)
        ]
        update = inline(update, others) if others else update.copy()
        functions.update(update.functions)
        taken = Names(name for domain, name, _ in functions if domain == DOMAIN)
        function = _as_function(update, taken.fresh(update.graph.name or self.name))
        functions[function.identifier()] = function
        return function

    def __str__(self) -> str:
        return f"{self.name}:lr={self.lr:g}"


def name_inputs(update: Model, names: Sequence[str]) -> None:
    """Rename the inputs of a graph, in place; other values that have these names are renamed."""
    graph, taken, reserved = update.graph, update.names(), set(names)
    taken.take(reserved)
    for value in [value for inner in graphs_in(graph) for value in values(inner)]:
        if value.name in reserved and value not in graph.inputs:
            value.name = taken.fresh(value.name)
    for value, name in zip(graph.inputs, names, strict=True):
        value.name = name


def gradient_of(parameter: str) -> str:
    """Return the name of the input for the gradient of a parameter."""
    return f"{parameter}/{GRADIENT}"


def _clashes(function: ir.Function, functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> bool:
    other = functions.get(function.identifier())
    return other is not None and ir.to_proto(other) != ir.to_proto(function)


def _as_function(update: Model, name: str) -> ir.Function:
    """Convert a graph, which is consumed, to a function: its initializers become constants."""
    graph, names = update.graph, update.names()
    inputs, outputs, doc = list(graph.inputs), list(graph.outputs), graph.doc_string
    nodes, initializers = take_apart(graph)
    body = ir.Graph(inputs, [], nodes=[], opset_imports=dict(update.ir.opset_imports), name=name)
    op = Builder(body, opset=update.opset, names=names)
    for value in initializers:
        assert value.const_value is not None
        constant = op.constant(ir.Tensor(value.const_value.numpy(), dtype=value.const_value.dtype)).value
        value.replace_all_uses_with(constant)
        outputs = [constant if output is value else output for output in outputs]
    body.extend(nodes)
    for output in outputs:
        is_fresh = output.producer() is not None and not output.is_graph_output()
        body.outputs.append(output if is_fresh else op.Identity(output).like(output).value)
    function = ir.Function(DOMAIN, name, graph=body, attributes=[])
    function.doc_string = doc
    return function


def _for_each(single: FunctionOptimizer, targets: Mapping[str, ir.Value]) -> FunctionOptimizer:
    """Return an optimizer of several parameters from that of one: a function, called for each."""
    opset, state = single.update.opset, single.state
    graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name=f"{single.name}ForEach")
    op = Builder(graph, opset=opset)
    function = single.define(op.functions, opset)
    common = {RATE: _scalar(RATE, ir.DataType.DOUBLE), COUNT: _scalar(COUNT, ir.DataType.INT64)}
    arguments: list[dict[str, ir.Value]] = []
    for name, target in targets.items():
        slots = {slot.name or "": _like(f"{name}/{slot.name}", slot, target) for slot in state}
        own = {"x": _like(name, target, target), "g": _like(gradient_of(name), target, target)}
        arguments.append({**common, **own, **slots})
    for role in ("x", "g", *(slot.name or "" for slot in state)):
        graph.inputs.extend(of[role] for of in arguments)
    graph.inputs[:0] = common.values()
    results = []
    for of in arguments:
        inputs = [of[value.name or ""] for value in single.inputs]
        outputs = op.node(DOMAIN, function.name, *inputs, outputs=1 + len(state))
        results.append(outputs if isinstance(outputs, tuple) else (outputs,))
    for column in zip(*results, strict=True):
        graph.outputs.extend(expr.value for expr in column)
    initial = {f"{name}/{slot}": value for slot, value in single.initial.items() for name in targets}
    update = Model(ir.Model(graph, ir_version=IR_VERSION, functions=list(op.functions.values())))
    return dataclasses.replace(single, update=update, initial=initial)


def _scalar(name: str, dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([]))


def _like(name: str, declared: ir.Value, target: ir.Value) -> ir.Value:
    shape = target.shape if declared.shape is None else declared.shape
    return ir.Value(name=name, type=declared.type or target.type, shape=shape)


# ---- in a recipe -----------------------------------------------------------------------------------------------------

_DEFAULT_RATE = 1e-3
OPTIONS = ("function", "lr", "initial", "name")


def open_function(source: Any) -> FunctionOptimizer:
    """Return the optimizer in a graph: a model, a function or a file."""
    if isinstance(source, FunctionOptimizer):
        return source
    if isinstance(source, ir.Function) or type(source).__name__ == "FunctionProto":
        function = source.clone() if isinstance(source, ir.Function) else ir.from_proto(source)
        graph = function.graph
        graph.opset_imports.update(function.opset_imports)
        model = Model(ir.Model(graph, ir_version=IR_VERSION))
        optimizer = FunctionOptimizer(function.name, model, _DEFAULT_RATE)
    else:
        model = load(source).copy()
        optional = {name: value for name, value in model.graph.initializers.items() if value in model.graph.inputs}
        for name in optional:
            model.graph.initializers.pop(name)
        defaults = {name: v.const_value.numpy() for name, v in optional.items() if v.const_value is not None}
        lr = float(defaults.pop(RATE, np.asarray(_DEFAULT_RATE)))
        optimizer = FunctionOptimizer(model.graph.name or "optimizer", model, lr, defaults)
    optimizer.check()
    return optimizer


def change_options(optimizer: FunctionOptimizer, options: Mapping[str, Any]) -> FunctionOptimizer:
    """Return the optimizer with other options: `lr`, `initial`, `name`."""
    initial = options.get("initial", {})
    names = {value.name or "": 0 for value in optimizer.state}
    check_options(f"the state of the optimizer `{optimizer.name}`", initial, names)
    lr = checked_number(f"`lr` of optimizer `{optimizer.name}`", options.get(RATE, optimizer.lr), NOT_NEGATIVE)
    arrays = {name: np.asarray(value) for name, value in initial.items()}
    name = str(options.get("name", optimizer.name))
    return dataclasses.replace(optimizer, name=name, lr=lr, initial={**optimizer.initial, **arrays})
