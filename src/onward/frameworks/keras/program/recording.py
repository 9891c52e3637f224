"""Graphs as calls of Keras: the table is executed with values of a program in the place of tensors.

Each value has two shapes, one for each of two choices of the sizes that are not known. Where they are the same, the
size does not depend on the choice; where they differ, it is asked for when the program runs.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
import onnx_ir as ir

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
    take_single_results,
    with_stores,
)
from onward.frameworks.program.printing import Expression, FunctionWriter, Printer, is_idle
from onward.frameworks.program.short_forms import Dialect, OperatorArguments
from onward.frameworks.program.sizes import Choices, Extent, Shaped, Sizes, as_lists
from onward.frameworks.program.source_text import Identifiers, identifier, is_identifier
from onward.model import Model
from onward.transform.declare import way_out


class _Computation(keras.Operation):  # type: ignore[misc]
    """A function of the table, which Keras tells the shape of. Only tensors are arguments: JAX takes nothing else."""

    def __init__(self, function: Function, inputs: list[Any], attributes: Mapping[str, Any]):
        super().__init__()
        self._given = function, inputs, attributes

    def call(self, tensors: list[Any]) -> Any:
        function, inputs, attributes = self._given
        remaining = iter(tensors)

        def filled(x: Any) -> Any:
            if isinstance(x, list):
                return [filled(item) for item in x]
            return next(remaining) if isinstance(x, keras.KerasTensor) else x

        return function(*map(filled, inputs), **attributes)


_LITERAL = 64
"""Up to so many numbers are written into the program."""


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
        """Whether the result is the first input. For conversions, a backend that lacks bits cannot tell."""
        if function in (same, dropout):
            return function is same or (attributes["outputs"] == 1 and function(*inputs, **attributes) is inputs[0])
        wanted = attributes["to"] if function is convert else inputs[1].tensor.dtype
        return available("float64") == "float64" and inputs[0].tensor.dtype == wanted

    def _record(
        self, short: ProgramStep | None, function: Function, inputs: list[Any], attributes: dict[str, Any]
    ) -> Any:
        """The results of a call, which may have a short form; what was computed before is the same."""
        made = short or _call_of(function, inputs, attributes)
        step = self._known.setdefault(call_key(made), made)
        if step is made:
            first, second = (self._computed(function, inputs, attributes, choice) for choice in (0, 1))
            step.is_tuple = isinstance(first, list | tuple)
            pairs = zip(first, second, strict=True) if step.is_tuple else [(first, second)]
            kinds = [Shaped((tuple(a.shape), tuple(b.shape)), str(a.dtype)) for a, b in pairs]
            step.results = [Value(kind, step=step) for kind in kinds]
            self._lists.update([step] if isinstance(first, list) else [])
        if not step.is_tuple:
            return step.results[0]
        return list(step.results) if step in self._lists else tuple(step.results)  # a list is one value

    def _computed(self, function: Function, inputs: list[Any], attributes: dict[str, Any], choice: int) -> Any:
        tensors: list[Any] = []

        def stand_in(x: Any) -> Any:
            if isinstance(x, list):
                return [stand_in(item) for item in x]
            if isinstance(x, Extent):
                return x.pair[choice]
            if not isinstance(x, Value):
                return x
            tensors.append(keras.KerasTensor(x.tensor.shapes[choice], x.tensor.dtype))
            return tensors[-1]

        return _Computation(function, [stand_in(x) for x in inputs], attributes).compute_output_spec(tensors)


def _nested(array: np.ndarray) -> Any:
    """Return an array as lists of its numbers, which keep their type and so are printed with its digits."""
    return [_nested(row) for row in array] if array.ndim else array[()]


# ---- calls -----------------------------------------------------------------------------------------------------------


def _call_of(function: Function, inputs: list[Any], attributes: Mapping[str, Any]) -> ProgramStep:
    """A call as it stands, without what need not be said."""
    arguments = list(inputs)
    while arguments and arguments[-1] is None:
        arguments.pop()
    defaults = {key: p.default for key, p in inspect.signature(function).parameters.items()}
    named = {key: x for key, x in attributes.items() if not _is_same(key, x, defaults.get(key))}
    is_theirs = function.__module__.startswith("keras.")
    name = f"ops.{function.__name__}" if is_theirs else function.__name__
    return ProgramStep(name, arguments, named, call=None if is_theirs else function)


def _known(x: Any) -> Any:
    """What is known while the program is written: anything but a tensor, and a whole number that is one."""
    if not isinstance(x, Value):
        return x
    number = x.step.arguments[0] if _is_constant(x) and x.step is not None else None
    return int(number) if isinstance(number, np.integer) else None


def _is_constant(x: Any) -> bool:
    return isinstance(x, Value) and x.step is not None and x.step.function == "constant"


def _is_zero(x: Any) -> bool:
    return _is_constant(x) and not np.any(x.step.arguments[0])


def _cast(given: OperatorArguments, _: Mapping[str, str]) -> ProgramStep | None:
    dtype = given.attributes["to"]
    return ProgramStep("ops.cast", [given.inputs[0], dtype]) if "float" in dtype and dtype != "float64" else None


def _softmax(given: OperatorArguments, _: Mapping[str, str]) -> ProgramStep:
    axis = given.attributes.get("axis", -1)
    return ProgramStep("ops.softmax", [given.inputs[0], *([] if axis == -1 else [axis])])


_OPS = ("sum", "mean", "squeeze", "expand_dims", "concatenate", "broadcast_to", "reshape", "transpose", "log_softmax")
_DIALECT = Dialect(
    {**{name: f"ops.{name}" for name in _OPS}, "T": "ops.transpose"},
    {"Cast": _cast, "Softmax": _softmax},
    without=("And", "Or", "Not", "BitwiseXor"),  # variables of Keras have signs for truth values only
)


def _is_same(name: str, value: Any, default: Any) -> bool:
    if default is None and is_idle(name, value):
        return True
    if isinstance(value, float) and isinstance(default, float):
        return np.float32(value) == np.float32(default)
    return bool(value == default)


class KerasPrinter(Printer):
    def size(self, x: Expression, axis: int) -> Expression:
        return Expression(f"ops.shape({x.text})[{axis}]", depth=x.depth + 1)


# ---- whole graphs ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """A graph as calls."""

    results: dict[str, Value]
    """By the names of outputs."""
    taken: list[str]
    roles: dict[Value, str]

    def steps(self, stores: Mapping[str, str] | None = None) -> list[ProgramStep]:
        """All calls; `stores` says where some results are kept, by their names."""
        kept = [
            ProgramStep(".assign", [Value(path=place), self.results[name]]) for name, place in (stores or {}).items()
        ]
        outputs = [value for name, value in self.results.items() if name not in (stores or {})]
        found = with_stores(in_order(outputs), kept)
        take_single_results(found, outputs)
        return found

    def statements(
        self, steps: Iterable[ProgramStep], outputs: Iterable[Value], names: Mapping[Value, str] | None = None
    ) -> FunctionWriter:
        """Lines. State may be assigned before results are read, so all of these have names."""
        wanted = [*outputs] * 2
        folded = fold_repeats(list(steps), wanted)
        return FunctionWriter(folded, wanted, names or {}, KerasPrinter, _place, taken=self.taken, roles=self.roles)


def _place(value: Value) -> Expression:
    return Expression(value.path)


MENTIONED = frozenset({
    "inputs", "training", "grads", "variables", "trainable_variables", "sample_weight", "available", "as_single",
    "fit_target", "constant", "ops", "keras", "np", "math", "params", "slots", "gradients", "name", "names", "i",
    *(function.__name__ for function in ROWS.values() if not function.__module__.startswith("keras.")),
})  # fmt: skip
"""What methods read beside their own variables."""


def record(model: Model, given: Mapping[str, str], choices: Choices, constants: dict[str, np.ndarray]) -> Program:
    """The graph of a model as a program, in which inputs are the expressions that are given."""
    names = Identifiers([*MENTIONED, *given.values()])
    recorder = Recorder(constants)
    inputs = {}
    for value in model.graph.inputs:
        if value.is_initializer():
            continue
        if value.shape is None or value.dtype is None:
            raise UnsupportedError(f"nothing says which shape `{value.name}` has", hint=way_out(value.name or ""))
        kind = Shaped(choices.shapes(value), available(value.dtype.numpy().name))
        made = inputs[value.name or ""] = Value(kind, path=given[value.name or ""])
        dims = [None if isinstance(size, int) else _dim(value, i, size.value) for i, size in enumerate(value.shape)]
        fresh = [None if dim is None else names.fresh(identifier(dim)) for dim in dims]
        recorder.known_sizes.name(made, fresh, lambda x: ("ops.shape", [x]))
    results = {name: recorder.place(x) for name, x in interpret(model, recorder)(inputs).items()}
    taken = [*MENTIONED, *(text for text in given.values() if is_identifier(text))]
    return Program(results, taken, recorder.known_sizes.roles)


def _dim(value: ir.Value, axis: int, name: str | None) -> str:
    """What a size is called."""
    return "batch" if axis == 0 else name or f"{value.name}_{axis}"
