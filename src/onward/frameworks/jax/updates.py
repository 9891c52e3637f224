"""Updates that optax lacks, as optax transformations that JAX executes.

They execute the definitions of recipe/optimizers/updates.py, or the optimizer that a training model
holds as a function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import onnx_ir as ir
import optax

from onward.build import DOMAIN, DOMAIN_VERSION, Builder, Expr
from onward.engines.framework_engine import interpreter
from onward.engines.jax import Jax
from onward.frameworks.formulas.graph_building import model_of, put_out
from onward.frameworks.jax.runtime import exact_clip, joint, transformation
from onward.model import Model
from onward.recipe.optimizers import ConfiguredOptimizer, FunctionOptimizer, optimizer
from onward.recipe.optimizers.definition import Slot
from onward.recipe.optimizers.graph_optimizer import COUNT, RATE, gradient_of
from onward.recipe.schedules import SchedulePart, schedule, sequence
from onward.recipe.spec import Spec, parse
from onward.run_state.state import ParameterGroup
from onward.standard import COMMON_OPSET
from onward.transform.inline import inline

Rate = float | Callable[[Any], Any]  # a learning rate, or a function of the count of updates
Function = Callable[[Mapping[str, Any]], dict[str, Any]]  # of arrays by name
Sizes = tuple[tuple[int, ...], str]  # a shape, and the name of a type


def recipe_optimizer(group: ParameterGroup, rate: Rate) -> optax.GradientTransformation:
    """Return the optimizer of a group, with this learning rate."""
    spec = group.spec

    def begin(x: Any) -> dict[str, Any]:
        with Jax().active():
            slots = slots_of(spec, sizes_of(x))
            return {slot.name: jnp.full(slot.shape, slot.initial, slot.dtype.numpy()) for slot in slots}

    def rule(x: Any, g: Any, *, lr: Any, t: Any, **slots: Any) -> tuple[Any, dict[str, Any]]:
        new = _update(str(spec), sizes_of(x))({"x": x, "g": g, **slots, "lr": lr, "t": t})
        return new["x/new"], {name: new[f"{name}/new"] for name in slots}

    return transformation(dict.fromkeys(group.parameters, (begin, rule)), rate)


def rate_of(specs: Sequence[Spec], lr: float) -> Callable[[Any], Any]:
    """Return successive schedules of a recipe as a function: count of updates -> rate."""

    def rate(count: Any) -> Any:
        return _rate(tuple(map(str, specs)), lr)({"step": count})["rate"]

    return rate


def function_optimizer(function: FunctionOptimizer, group: str, rate: Rate) -> optax.GradientTransformation:
    """Return a function as an optimizer of the parameters of a group, with this learning rate."""
    names, stored_names = function.parameters, places_of(function, group)
    run = execute_by_jax(inline(function.update), Jax())

    def begin() -> dict[str, Any]:
        return {stored_names[name]: jnp.asarray(array) for name, array in initial_state(function).items()}

    def rule(params: Any, gradients: Any, state: Any, lr: Any, t: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        feeds = {RATE: lr, COUNT: t, **{name: state[stored_name] for name, stored_name in stored_names.items()}}
        feeds |= {name: params[name] for name in names} | {gradient_of(name): gradients[name] for name in names}
        after = run(feeds)
        new = [after[value.name or ""] for value in function.update.graph.outputs]
        new_params = dict(zip(names, new, strict=False))
        return new_params, dict(zip(stored_names.values(), new[len(names) :], strict=True))

    return joint(names, rule, begin, rate)


def places_of(function: FunctionOptimizer, group: str) -> dict[str, str]:
    """Return the name in a training model of each state of a function."""
    names = (value.name or "" for value in function.state)
    return {name: name if function.owner_of(name) else f"{group}/{name}" for name in names}


def initial_state(function: FunctionOptimizer) -> dict[str, np.ndarray]:
    """Return the initial state of a function."""
    arrays = {}
    for value in function.state:
        assert value.dtype is not None and value.shape is not None
        initial = np.asarray(function.initial.get(value.name or "", 0))
        arrays[value.name or ""] = np.broadcast_to(initial, tuple(value.shape.numpy())).astype(value.dtype.numpy())
    return arrays


class OptaxObjects:
    """Functions of optax and of this module. `OptimizerSource` has the same as source."""

    rate_of = staticmethod(rate_of)
    exact_clip = staticmethod(exact_clip)
    function_optimizer = staticmethod(function_optimizer)
    recipe_optimizer = staticmethod(recipe_optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(optax, name)


OBJECTS = OptaxObjects()


@functools.lru_cache(maxsize=256)
def _update(spec: str, sizes: Sizes) -> Function:
    return execute_by_jax(update_model(parse(spec), sizes), Jax())


def update_model(spec: Spec, sizes: Sizes) -> Model:
    """Return the update of a parameter: x, g, its slots, lr and t -> x/new and new slots."""
    configured, op = _configure(spec), _new_graph()
    x, g = (_input(op, name, _type_of(sizes), sizes[0]) for name in ("x", "g"))
    slots = {slot.name: _input(op, slot.name, slot.dtype, slot.shape) for slot in configured.slots(x.value)}
    lr, t = _input(op, "lr", ir.DataType.DOUBLE), _input(op, "t", ir.DataType.INT64)
    hyper = {name: _number(op, configured.values[name]) for name in configured.inputs(x.value)}
    new, after = configured.update(op, x, g, slots, lr=lr, t=t, hyper=hyper)
    return _model(op, {f"{name}/new": expr for name, expr in {"x": new, **after}.items()})


@functools.lru_cache(maxsize=64)
def _rate(specs: tuple[str, ...], lr: float) -> Function:
    return execute_by_jax(rate_model([parse(spec) for spec in specs], lr), Jax())


def rate_model(specs: Sequence[Spec], lr: float) -> Model:
    """Return successive schedules: step -> rate."""
    op, schedules = _new_graph(), []
    step = _input(op, "step", ir.DataType.INT64)
    for spec in specs:
        numbers, choices = schedule(spec.name).resolve(spec.without("until").options)
        values = {name: _number(op, value) for name, value in numbers.items()}
        until = _number(op, spec.options.get("until", math.inf))
        schedules.append(SchedulePart(schedule(spec.name), values, choices, until))
    return _model(op, {"rate": sequence(op, _number(op, lr), step, schedules)})


def _new_graph() -> Builder:
    imports = {"": COMMON_OPSET, DOMAIN: DOMAIN_VERSION}
    return Builder(ir.Graph([], [], nodes=[], opset_imports=imports, name="exact"), opset=COMMON_OPSET, functions={})


def _input(op: Builder, name: str, dtype: ir.DataType, shape: Sequence[int] = ()) -> Expr:
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    op.graph.inputs.append(value)
    return op(value)


def _number(op: Builder, value: Any) -> Expr:
    return op.constant(np.asarray(value, np.float64))


def _model(op: Builder, outputs: Mapping[str, Expr]) -> Model:
    for name, expr in outputs.items():
        put_out(op, op.Identity(expr).like(expr.value), name)
    return inline(model_of(op.graph, op.functions.values()))


def execute_by_jax(model: Model, framework: Jax) -> Function:
    """Return a model as a function of arrays by name. The model has no functions, and is changed.

    It converts its inputs, and ignores other arrays.
    """
    types, execute = types_of(model), interpreter(model, framework)

    def run(arrays: Mapping[str, Any]) -> dict[str, Any]:
        with framework.active():
            return execute({name: jnp.asarray(arrays[name], dtype) for name, dtype in types.items()})

    return run


def types_of(model: Model) -> dict[str, np.dtype]:
    return {value.name or "": value.dtype.numpy() for value in model.graph.inputs if value.dtype}


def _configure(spec: Spec) -> ConfiguredOptimizer:
    """Return the optimizer as a function, even if ONNX has an operator for it."""
    definition = optimizer(spec.name)
    return definition.configure(**{**spec.options, **({"standard": False} if definition.standard else {})})


def slots_of(spec: Spec, sizes: Sizes) -> tuple[Slot, ...]:
    parameter = ir.Value(name="x", type=ir.TensorType(_type_of(sizes)), shape=ir.Shape(sizes[0]))
    return _configure(spec).slots(parameter)


def sizes_of(array: Any) -> Sizes:
    return tuple(array.shape), str(array.dtype)


def _type_of(sizes: Sizes) -> ir.DataType:
    return ir.DataType.from_numpy(jnp.dtype(sizes[1]))
