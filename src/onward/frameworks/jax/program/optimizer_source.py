"""Source of optimizers: calls of optax, and functions for updates that optax lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.frameworks.jax.optimizer import transformation
from onward.frameworks.jax.program.operators import identifier, pairs, type_name, write_literal
from onward.frameworks.jax.program.recording import GraphPrinter
from onward.frameworks.jax.updates import Sizes, initial_state, places_of, rate_model, sizes_of, slots_of, update_model
from onward.frameworks.program.source_text import Identifiers, quote
from onward.recipe.optimizers import FunctionOptimizer
from onward.recipe.optimizers.graph_optimizer import COUNT, RATE, gradient_of
from onward.recipe.spec import Spec
from onward.run_state.state import ParameterGroup, RunState
from onward.transform.inline import inline


class Text(str):
    """Source of an expression."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class OptimizerSource:
    """Functions of optax that return source instead of objects."""

    def __init__(self, printer: GraphPrinter, params: Mapping[str, Any]):
        self.functions: list[str] = []  # definitions that the source calls
        self._printer = printer
        self._params = params
        self._names = Identifiers()
        self._defined: dict[tuple[str, str], str] = {}

    def __getattr__(self, name: str) -> Callable[..., Text]:
        def call(*arguments: Any, **options: Any) -> Text:
            keywords = (f"{key}={_write_value(value)}" for key, value in options.items())
            return Text(f"optax.{name}({', '.join([*map(_write_value, arguments), *keywords])})")

        return call

    def optimizer(self, run: RunState) -> Text:
        tx = transformation(run, self)
        every = int(run.recipe.get("accumulate", 1))
        if every == 1:
            return tx
        dtype = type_name(jnp.result_type(*self._params.values()))
        return Text(f"optax.MultiSteps({tx}, {every}, accumulator_dtype={dtype}).gradient_transformation()")

    def rate_of(self, specs: Sequence[Spec], lr: float) -> Text:
        lines, results = self._printer.body(rate_model(specs, lr), {"step": "count"})
        text = _function(["count"], ["count = jnp.asarray(count, np.int64)", *lines, f"return {results['rate']}"])
        return Text(self._define("rate", text))

    def exact_clip(self, norm_of: str, limit: float, variant: str) -> Text:
        return Text(f"{self._printer.helper('exact_clip')}({quote(norm_of)}, {limit!r}, {quote(variant)})")

    def recipe_optimizer(self, group: ParameterGroup, rate: Any) -> Text:
        rules = {name: self._rule(group.spec, sizes_of(self._params[name])) for name in group.parameters}
        entries = [f"{quote(name)}: ({slots}, {update})" for name, (slots, update) in rules.items()]
        return Text(f"{self._printer.helper('transformation')}({{{', '.join(entries)}}}, {_write_value(rate)})")

    def function_optimizer(self, function: FunctionOptimizer, group: str, rate: Any) -> Text:
        names, stored_names = function.parameters, places_of(function, group)
        expressions = {name: f"params[{quote(name)}]" for name in names}
        expressions |= {gradient_of(name): f"gradients[{quote(name)}]" for name in names}
        expressions |= {name: f"state[{quote(stored_name)}]" for name, stored_name in stored_names.items()}
        for value in function.inputs:
            if value.name in (RATE, COUNT) and value.dtype is not None:
                expressions[value.name] = f"{value.name}.astype({type_name(value.dtype.numpy())})"
        model = inline(function.update)
        results = [value.name or "" for value in model.graph.outputs]
        lines, texts = self._printer.body(model, expressions)
        after = dict(zip([*names, *stored_names.values()], (texts[result] for result in results), strict=True))
        new = pairs({name: after[name] for name in names})
        new_state = pairs({stored_name: after[stored_name] for stored_name in stored_names.values()})
        prefix = identifier(function.name)
        arguments = ["params", "gradients", "state", "lr", "t"]
        step = self._define(f"{prefix}_update", _function(arguments, [*lines, f"return {{{new}}}, {{{new_state}}}"]))
        starts = {stored_names[name]: self._start(name, array) for name, array in initial_state(function).items()}
        begin = self._define(f"{prefix}_state", _function([], [f"return {{{pairs(starts)}}}"]))
        listed = ", ".join(map(quote, names))
        return Text(f"{self._printer.helper('joint')}([{listed}], {step}, {begin}, {_write_value(rate)})")

    def _start(self, name: str, array: np.ndarray) -> str:
        """Return the source of an array, which is short if all numbers are equal."""
        if array.size and (array == array.flat[0]).all():
            return f"jnp.full({array.shape}, {write_literal(array.flat[0])}, {type_name(array.dtype)})"
        return f"jnp.asarray({self._printer.stored(f'{name}/initial', array)})"

    def _rule(self, spec: Spec, sizes: Sizes) -> tuple[str, str]:
        """Return the names of two functions: the initial slots, and the update."""
        slots = slots_of(spec, sizes)
        starts = []
        for slot in slots:
            dtype = type_name(slot.dtype.numpy())
            shape = "x.shape" if slot.shape == sizes[0] and slot.shape else str(slot.shape)
            starts.append(f"{quote(slot.name)}: jnp.full({shape}, {slot.initial!r}, {dtype})")
        begin = _function(["x"], [f"return {{{', '.join(starts)}}}"])
        names = ["x", "g", *(slot.name for slot in slots), "lr", "t"]
        lines, results = self._printer.body(update_model(spec, sizes), {name: name for name in names})
        after = ", ".join(f"{quote(slot.name)}: {results[f'{slot.name}/new']}" for slot in slots)
        step = _function(names, [*lines, f"return {results['x/new']}, {{{after}}}"])
        prefix = identifier(spec.name)
        return self._define(f"{prefix}_slots", begin), self._define(f"{prefix}_update", step)

    def _define(self, name: str, text: str) -> str:
        """Define a function once, and return its name."""
        if (name, text) not in self._defined:
            self._defined[name, text] = self._names.fresh(name)
            self.functions.append(f"def {self._defined[name, text]}{text}")
        return self._defined[name, text]


def _function(arguments: Sequence[str], lines: Sequence[str]) -> str:
    return "\n    ".join([f"({', '.join(arguments)}):", *lines])


def _write_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{pairs({key: _write_value(item) for key, item in value.items()})}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_write_value, value))}]"
    return quote(value) if isinstance(value, str) and not isinstance(value, Text) else repr(value)
