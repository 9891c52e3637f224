"""Graphs as calls of Keras: the rows of the table are executed with values of a program instead of
tensors.

Each value has two shapes, for two choices of the dynamic sizes. A size that is the same in both
does not depend on the choice; another one is computed when the program runs.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from onward.engines.framework import Function, NotOnHost
from onward.engines.keras import ROWS
from onward.engines.keras.elementwise import convert, convert_like, same
from onward.engines.keras.layers import dropout
from onward.engines.keras.types import available, constant
from onward.errors import UnsupportedError
from onward.frameworks.keras.step_graphs import GraphKeras, interpret
from onward.frameworks.program.calls import (
    ProgramStep,
    Value,
    call_key,
    fold_repeats,
    in_order,
    map_argument,
    take_single_results,
    with_stores,
)
from onward.frameworks.program.printing import Expression, FunctionWriter, Printer, is_idle
from onward.frameworks.program.short_forms import Dialect, OperatorArguments
from onward.frameworks.program.sizes import Choices, Extent, Shaped, Sizes, as_lists
from onward.frameworks.program.source_text import Identifiers, identifier, is_identifier
from onward.model import Model
from onward.transform.declare import declare_hint


class _Computation(keras.Operation):  # type: ignore[misc]
    """Row of the table as an operation. On JAX, all arguments must be tensors."""

    def __init__(self, function: Function, inputs: list[Any], attributes: Mapping[str, Any]):
        super().__init__()
        self._computation = function, inputs, attributes

    def call(self, tensors: list[Any]) -> Any:
        function, inputs, attributes = self._computation
        remaining = iter(tensors)
        filled = map_argument(inputs, lambda x: next(remaining) if isinstance(x, keras.KerasTensor) else x)
        return function(*filled, **attributes)


_LITERAL = 64  # arrays with at most this many elements are written into the program


class Recorder(GraphKeras):
    """Keras while it writes a program."""

    def __init__(self, constants: dict[str, np.ndarray]):
        super().__init__()
        self.known_sizes = Sizes()
        self._constants = constants
        self._known: dict[Any, ProgramStep] = {}
        self._lists: set[ProgramStep] = set()

    def shape_of(self, x: Value) -> list[Any]:
        return self.known_sizes.of(x)

    def tensor(self, array: np.ndarray) -> Any:
        if array.dtype.hasobject:
            return self._record(None, keras.ops.convert_to_tensor, [as_lists(array), "int32"], {})
        dtype = str(array.dtype)
        if array.size <= _LITERAL:
            return self._record(None, constant, [_nested(array), dtype], {})
        name = next((name for name, other in self._constants.items() if other is array), None)
        if name is None:
            name = f"constant_{len(self._constants) + 1}"
            self._constants[name] = array
        return Value(Shaped((array.shape, array.shape), available(dtype)), path=f"self.{name}")

    def array(self, tensor: Any) -> np.ndarray:
        raise NotOnHost

    def call(self, operator: str, function: Function, /, *arguments: Any, **attributes: Any) -> Any:
        inputs = list(arguments)
        if function in (same, dropout, convert, convert_like) and self._keeps(function, inputs, attributes):
            return inputs[0]
        if operator == "Conv" and len(inputs) > 2 and _is_zero(inputs[2]):  # which exporters write for no bias
            inputs = inputs[:2]
        first = next((x for x in inputs if isinstance(x, Value)), None)
        shape = self.known_sizes.of(inputs[0]) if inputs and isinstance(inputs[0], Value) else None
        is_float = first is not None and "float" in first.tensor.dtype
        short = _DIALECT.short_form(
            operator, OperatorArguments(inputs, [*map(_known, inputs)], attributes, shape), is_float
        )
        return short if isinstance(short, Value) else self._record(short, function, inputs, attributes)

    def _keeps(self, function: Function, inputs: list[Any], attributes: dict[str, Any]) -> bool:
        """True if the result is the first input. Without 64 bits, conversions are unknown."""
        if function in (same, dropout):
            return function is same or (attributes["outputs"] == 1 and function(*inputs, **attributes) is inputs[0])
        dtype = attributes["to"] if function is convert else inputs[1].tensor.dtype
        return available("float64") == "float64" and inputs[0].tensor.dtype == dtype

    def _record(
        self, short: ProgramStep | None, function: Function, inputs: list[Any], attributes: dict[str, Any]
    ) -> Any:
        """Return the results of a call or its short form. Repeated calls share results."""
        recorded = short or _call_of(function, inputs, attributes)
        step = self._known.setdefault(call_key(recorded), recorded)
        if step is recorded:
            first, second = (self._computed(function, inputs, attributes, choice) for choice in (0, 1))
            step.is_tuple = isinstance(first, list | tuple)
            pairs = zip(first, second, strict=True) if step.is_tuple else [(first, second)]
            shaped = [Shaped((tuple(a.shape), tuple(b.shape)), str(a.dtype)) for a, b in pairs]
            step.results = [Value(tensor, step=step) for tensor in shaped]
            self._lists.update([step] if isinstance(first, list) else [])
        if not step.is_tuple:
            return step.results[0]
        return list(step.results) if step in self._lists else tuple(step.results)  # a list is one value

    def _computed(self, function: Function, inputs: list[Any], attributes: dict[str, Any], choice: int) -> Any:
        tensors: list[Any] = []

        def stand_in(x: Any) -> Any:
            if isinstance(x, Extent):
                return x.pair[choice]
            if not isinstance(x, Value):
                return x
            tensors.append(keras.KerasTensor(x.tensor.shapes[choice], x.tensor.dtype))
            return tensors[-1]

        return _Computation(function, map_argument(inputs, stand_in), attributes).compute_output_spec(tensors)


def _nested(array: np.ndarray) -> Any:
    """Return an array as nested lists of its numbers, which keep their type and so their digits."""
    return [_nested(row) for row in array] if array.ndim else array[()]


def _call_of(function: Function, inputs: list[Any], attributes: Mapping[str, Any]) -> ProgramStep:
    """Return a call without the arguments that are defaults."""
    arguments = list(inputs)
    while arguments and arguments[-1] is None:
        arguments.pop()
    defaults = {key: p.default for key, p in inspect.signature(function).parameters.items()}
    named = {key: x for key, x in attributes.items() if not _is_default(key, x, defaults.get(key))}
    is_theirs = function.__module__.startswith("keras.")
    name = f"ops.{function.__name__}" if is_theirs else function.__name__
    return ProgramStep(name, arguments, named, call=None if is_theirs else function)


def _known(x: Any) -> Any:
    """Return an argument that is known while writing: no tensor, or an integer constant."""
    if not isinstance(x, Value):
        return x
    number = x.step.arguments[0] if _is_constant(x) and x.step is not None else None
    return int(number) if isinstance(number, np.integer) else None


def _is_constant(x: Any) -> bool:
    return isinstance(x, Value) and x.step is not None and x.step.function == "constant"


def _is_zero(x: Any) -> bool:
    return _is_constant(x) and not np.any(x.step.arguments[0])


def _cast(call: OperatorArguments, _: Mapping[str, str]) -> ProgramStep | None:
    dtype = call.attributes["to"]
    return ProgramStep("ops.cast", [call.inputs[0], dtype]) if "float" in dtype and dtype != "float64" else None


def _softmax(call: OperatorArguments, _: Mapping[str, str]) -> ProgramStep:
    axis = call.attributes.get("axis", -1)
    return ProgramStep("ops.softmax", [call.inputs[0], *([] if axis == -1 else [axis])])


_OPS = ("sum", "mean", "squeeze", "expand_dims", "concatenate", "broadcast_to", "reshape", "transpose", "log_softmax")
_DIALECT = Dialect(
    {**{name: f"ops.{name}" for name in _OPS}, "T": "ops.transpose"},
    {"Cast": _cast, "Softmax": _softmax},
    without=("And", "Or", "Not", "BitwiseXor"),  # variables of Keras have signs for truth values only
)


def _is_default(name: str, value: Any, default: Any) -> bool:
    if default is None and is_idle(name, value):
        return True
    if isinstance(value, float) and isinstance(default, float):
        return np.float32(value) == np.float32(default)
    return bool(value == default)


class KerasPrinter(Printer):
    def size(self, x: Expression, axis: int) -> Expression:
        return Expression(f"ops.shape({x.text})[{axis}]", depth=x.depth + 1)


@dataclasses.dataclass(frozen=True)
class Program:
    """Graph as calls."""

    results: dict[str, Value]  # by the names of outputs
    taken: list[str]  # identifiers that variables must not use
    roles: dict[Value, str]

    def steps(self, stores: Mapping[str, str] | None = None) -> list[ProgramStep]:
        """Return all calls. `stores` are targets to which results are assigned, by name."""
        assignments = [
            ProgramStep(".assign", [Value(path=target), self.results[name]]) for name, target in (stores or {}).items()
        ]
        outputs = [value for name, value in self.results.items() if name not in (stores or {})]
        steps = with_stores(in_order(outputs), assignments)
        take_single_results(steps, outputs)
        return steps

    def statements(
        self, steps: Iterable[ProgramStep], outputs: Iterable[Value], names: Mapping[Value, str] | None = None
    ) -> FunctionWriter:
        """Return the statements. All results get names: state is assigned before they are read."""
        results = [*outputs] * 2
        folded = fold_repeats(list(steps), results)
        path = lambda value: Expression(value.path)
        return FunctionWriter(folded, results, names or {}, KerasPrinter, path, taken=self.taken, roles=self.roles)


# Names that methods of a program read, besides their own variables.
MENTIONED = frozenset({
    "inputs", "training", "grads", "variables", "trainable_variables", "sample_weight", "available", "as_single",
    "fit_target", "constant", "ops", "keras", "np", "math", "params", "slots", "gradients", "name", "names", "i",
    *(function.__name__ for function in ROWS.values() if not function.__module__.startswith("keras.")),
})  # fmt: skip


def record(model: Model, expressions: Mapping[str, str], choices: Choices, constants: dict[str, np.ndarray]) -> Program:
    """Return the graph of a model as a program; `expressions` are its inputs."""
    names = Identifiers([*MENTIONED, *expressions.values()])
    recorder = Recorder(constants)
    inputs = {}
    for value in model.graph.inputs:
        if value.is_initializer():
            continue
        if value.shape is None or value.dtype is None:
            raise UnsupportedError(f"nothing says which shape `{value.name}` has", hint=declare_hint(value.name or ""))
        shaped = Shaped(choices.shapes(value), available(value.dtype.numpy().name))
        recorded = inputs[value.name or ""] = Value(shaped, path=expressions[value.name or ""])
        dims: list[str | None] = []
        for axis, size in enumerate(value.shape):
            name = None if isinstance(size, int) else "batch" if axis == 0 else size.value or f"{value.name}_{axis}"
            dims.append(None if name is None else names.fresh(identifier(name)))
        recorder.known_sizes.name(recorded, dims, lambda x: ("ops.shape", [x]))
    results = {name: recorder.place(x) for name, x in interpret(model, recorder)(inputs).items()}
    taken = [*MENTIONED, *(text for text in expressions.values() if is_identifier(text))]
    return Program(results, taken, recorder.known_sizes.roles)
