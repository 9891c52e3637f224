"""The interpreter of all frameworks: runs a graph node by node with the operators of a table.

Values are tensors of the framework or numpy arrays on the host. A node whose inputs are all on the
host is computed there, such as shape arithmetic (see framework.py). `Gradient` is the framework's
own derivative of the nodes between its variables and its result (see plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.engines.framework import HOST_INPUTS, Framework, NotOnHost, counts_far
from onward.engines.plan import Differentiation, FusedCall, GraphPlan, OperatorCall
from onward.engines.step_errors import is_ours
from onward.errors import Error, UnsupportedError

Values = dict[ir.Value, Any]


class Interpreter:
    """Executor of one graph without functions."""

    def __init__(self, plan: GraphPlan, framework: Framework):
        self._plan = plan
        self._framework = framework
        self._placed: Values = {}

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs by name. Inputs are tensors, or arrays that stay on the host."""
        values: Values = {value: inputs[name] for name, value in self._plan.inputs.items()}
        with self._framework.active(), np.errstate(all="ignore"):  # infinity and NaN are valid results
            self.execute(self._plan, values)
            return {value.name or "": self.typed(value, values[value]) for value in self._plan.outputs}

    def typed(self, value: ir.Value, result: Any) -> Any:
        return self._framework.typed(result, value.dtype) if self._is_tensor(result) else result

    # ---- execution ---------------------------------------------------------------------------------------------------

    def execute(self, plan: GraphPlan, values: Values) -> None:
        values.update(plan.constants)
        for item in plan.items:
            match item:
                case OperatorCall():
                    self._call(item, values)
                case Differentiation():
                    self._differentiate(item, values)
                case FusedCall():
                    self._fuse(item, values)
            for value in item.last_used:
                values.pop(value, None)

    def _call(self, call: OperatorCall, values: Values) -> None:
        inputs = [None if value is None else values[value] for value in call.inputs]
        try:
            if call.graphs and call.function is not None:
                bodies = {name: _Body(self, plan, values) for name, plan in call.graphs.items()}
                results = call.function(*inputs, **bodies, framework=self._framework)
            elif call.on_host is not None and (call.function is None or self._belongs_on_host(call.operator, inputs)):
                results = call.on_host(*map(self._fetch, inputs))
            else:
                assert call.function is not None
                host = HOST_INPUTS.get(call.operator, ())
                numbers = self._framework.takes_numbers.get(call.operator, ())
                placed = (
                    self._fetch(x)
                    if i in host or (i in numbers and isinstance(x, np.ndarray) and x.ndim == 0)
                    else self._place(value, x)
                    for i, (value, x) in enumerate(zip(call.inputs, inputs, strict=True))
                )
                results = call.function(*placed)
        except NotOnHost as error:
            raise UnsupportedError(
                f"{call.described} needs a value, but compiling knows only shapes",
                hint="run without compiling: `compile=False` (`--no-compile`)",
            ) from error
        except Error:
            raise
        except Exception as error:
            if is_ours(error):
                error.add_note(f"in {call.described}, on {self._framework.name}")
                raise
            raise UnsupportedError(
                f"{self._framework.name} fails in {call.described}: {error}",
                hint="check the types and shapes of the inputs; if they fit the model, try another engine",
            ) from error
        if not isinstance(results, tuple):
            results = (results,)
        for value, result in zip(call.outputs, results, strict=False):
            if value is not None:  # numpy returns scalars, not arrays of rank 0
                values[value] = np.asarray(result) if isinstance(result, np.generic) else result

    def _fuse(self, item: FusedCall, values: Values) -> None:
        result = item.match.compute(self._framework, values)
        if result is NotImplemented:
            inner = {value: values[value] for value in item.plan.captured}
            self.execute(item.plan, inner)
            result = inner[item.match.output]
        values[item.match.output] = result

    def _differentiate(self, item: Differentiation, values: Values) -> None:
        around = {value: values[item.substitutes.get(value, value)] for value in item.plan.captured}
        on_host: Values = {}

        def forward(xs: Any) -> tuple[Any, list[Any]]:
            inner = {**around, **dict(zip(item.variables, xs, strict=True))}
            self.execute(item.plan, inner)
            on_host.update({value: inner[value] for value in item.shared if not self._is_tensor(inner[value])})
            return self._place(None, inner[item.y]), [inner[value] for value in item.shared if value not in on_host]

        xs = [self._place(value, values[value]) for value in item.points]
        try:
            y, shared, differentiate = self._framework.derivative(forward, xs)
            gradients = differentiate()
        except Error:
            raise
        except Exception as error:
            if is_ours(error):
                raise
            raise UnsupportedError(
                f"{self._framework.name} fails in its derivative: {error}", hint="use Onward's rules: `rules=True`"
            ) from error
        values.update(on_host)
        values.update(zip((value for value in item.shared if value not in on_host), shared, strict=True))
        if item.y in item.shared:
            values[item.y] = y
        for value, result in zip(item.outputs, gradients, strict=False):
            if value is not None:
                values[value] = result

    # ---- placement of values -----------------------------------------------------------------------------------------

    def _belongs_on_host(self, operator: str, inputs: Iterable[Any]) -> bool:
        """True if all inputs are on the host, or the framework does not have the type of one."""
        present = [value for value in inputs if value is not None]
        if all(map(self._is_host, present)):
            return bool(present) and not counts_far(operator, present)
        return not all(map(self._can_place, present))

    def _is_host(self, value: Any) -> bool:
        return all(map(self._is_host, value)) if isinstance(value, list) else isinstance(value, np.ndarray)

    def _can_place(self, value: Any) -> bool:
        if isinstance(value, list):
            return all(map(self._can_place, value))
        return not isinstance(value, np.ndarray) or self._framework.supports(value.dtype)

    def _is_tensor(self, value: Any) -> bool:
        return value is not None and not isinstance(value, list | np.ndarray)

    def _fetch(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._fetch(item) for item in value]
        return self._framework.array(value) if self._is_tensor(value) else value

    def _place(self, value: ir.Value | None, content: Any) -> Any:
        """Return the content of a value as a tensor. A constant is moved once, except during tracing."""
        if isinstance(content, list):
            return [self._place(None, item) for item in content]
        if not isinstance(content, np.ndarray):
            return content
        if value not in self._plan.constants or self._framework.is_tracing():
            return self._framework.tensor(content)
        if value not in self._placed:
            self._placed[value] = self._framework.tensor(content)
        return self._placed[value]


class _Body:
    """A nested graph as a function of its inputs. Captured values come from the outer graph."""

    def __init__(self, interpreter: Interpreter, plan: GraphPlan, around: Values):
        self._interpreter = interpreter
        self._plan = plan
        self._captured = {value: around[value] for value in plan.captured}
        self.types = [
            (
                None if value.dtype is None else value.dtype.numpy(),
                None if value.shape is None else [size if isinstance(size, int) else None for size in value.shape],
            )
            for value in plan.outputs
        ]

    def __call__(self, *inputs: Any) -> list[Any]:
        values = {**self._captured, **dict(zip(self._plan.inputs.values(), inputs, strict=True))}
        self._interpreter.execute(self._plan, values)
        return [self._interpreter.typed(value, values[value]) for value in self._plan.outputs]
