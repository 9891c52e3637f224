"""Updates that optax does not have, as transformations of optax: our own definitions, executed by JAX.

A definition is the function that a training model has for it (see recipe/optimizers/updates.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx_ir as ir
import optax

from onward.build import DOMAIN, DOMAIN_VERSION, Builder, Expr
from onward.engines.framework_engine import interpreter
from onward.engines.jax import Jax
from onward.frameworks.jax.runtime import exact_clip, joint, transformation
from onward.model import Model
from onward.recipe.optimizers import ConfiguredOptimizer, FunctionOptimizer, optimizer
from onward.recipe.optimizers.configuration import Slot
from onward.recipe.optimizers.graph_optimizer import COUNT, RATE, gradient_of
from onward.recipe.schedules import Part, schedule, sequence
from onward.recipe.spec import Spec, parse
from onward.run_state.state import Group
from onward.standard import COMMON_OPSET, IR_VERSION
from onward.transform.inline import inline

Rate = float | Callable[[Any], Any]
"""A learning rate, or a function of the updates already made."""

Function = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Of arrays by name."""

Sizes = tuple[tuple[int, ...], str]
"""A shape, and the name of a type."""


def exact(spec: Spec, names: Iterable[str], rate: Rate) -> optax.GradientTransformation:
    """An optimizer of a recipe for these parameters; `rate` is in place of its learning rate."""

    def begin(x: Any) -> dict[str, Any]:
        return {slot.name: _initial_slot(slot) for slot in slots_of(spec, sizes_of(x))}

    def rule(x: Any, g: Any, *, lr: Any, t: Any, **slots: Any) -> tuple[Any, dict[str, Any]]:
        new = _update(str(spec), sizes_of(x))({"x": x, "g": g, **slots, "lr": lr, "t": t})
        return new["x/new"], {name: new[f"{name}/new"] for name in slots}

    return transformation(dict.fromkeys(names, (begin, rule)), rate)


def rate_of(specs: Sequence[Spec], lr: float) -> Callable[[Any], Any]:
    """Schedules of a recipe that follow one another, as a function of the updates already made."""

    def rate(count: Any) -> Any:
        return _rate(tuple(map(str, specs)), lr)({"step": count})["rate"]

    return rate


def executed(function: FunctionOptimizer, group: str, rate: Rate) -> optax.GradientTransformation:
    """The function as an optimizer of parameters by name, those of a group; `rate` is for its learning rate."""
    names, places = function.parameters, places_of(function, group)
    results = [value.name or "" for value in function.update.graph.outputs]
    run = execute_by_jax(inline(function.update))

    def begin() -> dict[str, Any]:
        return {places[name]: jnp.asarray(array) for name, array in initial_state(function).items()}

    def rule(params: Any, gradients: Any, state: Any, lr: Any, t: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        given = {RATE: lr, COUNT: t, **{name: state[place] for name, place in places.items()}}
        given |= {name: params[name] for name in names} | {gradient_of(name): gradients[name] for name in names}
        found = run({value.name: given[value.name] for value in function.inputs if value.name})
        after = dict(zip([*names, *places.values()], (found[result] for result in results), strict=True))
        return {name: after[name] for name in names}, {place: after[place] for place in places.values()}

    return joint(names, rule, begin, rate)


def places_of(function: FunctionOptimizer, group: str) -> dict[str, str]:
    """By state of a function, what a training model calls it."""
    names = (value.name or "" for value in function.state)
    return {name: name if function.owner_of(name) else f"{group}/{name}" for name in names}


def initial_state(function: FunctionOptimizer) -> dict[str, np.ndarray]:
    """What the state of a function begins with."""
    made = {}
    for value in function.state:
        assert value.dtype is not None and value.shape is not None
        initial = np.asarray(function.initial.get(value.name or "", 0))
        made[value.name or ""] = np.broadcast_to(initial, tuple(value.shape.numpy())).astype(value.dtype.numpy())
    return made


class Objects:
    """Functions of optax, and ours for what it has none for. `program/spelling.py` says them in place of calling."""

    rate_of = staticmethod(rate_of)
    exact_clip = staticmethod(exact_clip)
    executed = staticmethod(executed)

    def exact(self, group: Group, rate: Rate) -> optax.GradientTransformation:
        return exact(group.spec, group.parameters, rate)

    def __getattr__(self, name: str) -> Any:
        return getattr(optax, name)


OBJECTS = Objects()


# ---- what is built of a definition -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _update(spec: str, sizes: Sizes) -> Function:
    return execute_by_jax(update_model(parse(spec), sizes))


def update_model(spec: Spec, sizes: Sizes) -> Model:
    """The update of a parameter: x, g, its slots, lr and t -> x/new, and each slot's."""
    configured = _configure(spec)
    made = _Graph()
    x, g = made.input(_value("x", sizes)), made.input(_value("g", sizes))
    slots = {slot.name: made.input(_declare(slot.name, slot.dtype, slot.shape)) for slot in configured.slots(x.value)}
    lr, t = made.input(_declare("lr", ir.DataType.DOUBLE, ())), made.input(_declare("t", ir.DataType.INT64, ()))
    hyper = {name: made.number(configured.values[name]) for name in configured.inputs(x.value)}
    new, after = configured.update(made.op, x, g, slots, lr=lr, t=t, hyper=hyper)
    return made.model({f"{name}/new": expr for name, expr in {"x": new, **after}.items()})


@functools.lru_cache(maxsize=64)
def _rate(specs: tuple[str, ...], lr: float) -> Function:
    return execute_by_jax(rate_model([parse(spec) for spec in specs], lr))


def rate_model(specs: Sequence[Spec], lr: float) -> Model:
    """Schedules that follow one another: step -> rate."""
    made = _Graph()
    step = made.input(_declare("step", ir.DataType.INT64, ()))
    parts = [_part(made, spec) for spec in specs]
    return made.model({"rate": sequence(made.op, made.number(lr), step, parts)})


def _part(made: _Graph, spec: Spec) -> Part:
    kind = schedule(spec.name)
    numbers, choices = kind.resolve(spec.without("until").options)
    until = made.number(spec.options.get("until", math.inf))
    return Part(kind, {name: made.number(value) for name, value in numbers.items()}, choices, until)


class _Graph:
    """A graph while it is built."""

    def __init__(self) -> None:
        imports = {"": COMMON_OPSET, DOMAIN: DOMAIN_VERSION}
        self._graph = ir.Graph([], [], nodes=[], opset_imports=imports, name="exact")
        self._functions: dict[ir.OperatorIdentifier, ir.Function] = {}
        self.op = Builder(self._graph, opset=COMMON_OPSET, functions=self._functions)

    def input(self, value: ir.Value) -> Expr:
        self._graph.inputs.append(value)
        return self.op(value)

    def number(self, value: Any) -> Expr:
        return self.op.constant(np.asarray(value, np.float64))

    def model(self, outputs: Mapping[str, Expr]) -> Model:
        for name, expr in outputs.items():
            self._graph.outputs.append(self.op.Identity(expr).named(name).like(expr.value).value)
        return inline(Model(ir.Model(self._graph, ir_version=IR_VERSION, functions=list(self._functions.values()))))


def execute_by_jax(model: Model) -> Function:
    """What a model, of which nothing is a function, computes, by JAX. The model is changed."""
    types = {value.name: value.dtype.numpy() for value in model.graph.inputs if value.dtype}
    framework = Jax()
    execute = interpreter(model, framework)

    def run(given: Mapping[str, Any]) -> dict[str, Any]:
        with framework.active():
            return execute({name: jnp.asarray(array, types[name]) for name, array in given.items()})

    return run


def _configure(spec: Spec) -> ConfiguredOptimizer:
    """The optimizer, as the function that it is even where the standard has an operator for it."""
    kind = optimizer(spec.name)
    return kind.configure(**{**spec.options, **({"standard": False} if kind.standard else {})})


def slots_of(spec: Spec, sizes: Sizes) -> tuple[Slot, ...]:
    """What an optimizer remembers of a parameter."""
    return _configure(spec).slots(_value("x", sizes))


def _initial_slot(slot: Slot) -> jax.Array:
    with Jax().active():
        return jnp.full(slot.shape, slot.initial, slot.dtype.numpy())


def sizes_of(array: Any) -> Sizes:
    return tuple(array.shape), str(array.dtype)


def _value(name: str, sizes: Sizes) -> ir.Value:
    return _declare(name, ir.DataType.from_numpy(jnp.dtype(sizes[1])), sizes[0])


def _declare(name: str, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
