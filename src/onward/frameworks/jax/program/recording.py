"""Graphs as bodies of Python functions: calls of JAX, and of operators whose source is copied."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import onnx_ir as ir
from onnx import defs

from onward.build import Names
from onward.engines.framework import HOST_INPUTS, ONLY_ON_HOST, counts_far
from onward.engines.framework_engine import make_plan
from onward.engines.jax import Jax
from onward.engines.plan import GraphPlan as Plan
from onward.engines.plan import OperatorCall as Call
from onward.engines.shared import sequence
from onward.engines.step_errors import is_ours
from onward.errors import UnsupportedError
from onward.frameworks.jax.program.operators import (
    MENTIONED,
    attribute,
    defaults,
    define,
    identifier,
    is_optional,
    literal,
    plain_type,
    rows,
    short,
    type_literal,
)
from onward.frameworks.jax.runtime import TYPES
from onward.frameworks.program import printing
from onward.frameworks.program.calls import Body, ProgramStep, Value, call_key, fold_repeats, in_order, with_stores
from onward.frameworks.program.printing import Expression, FunctionWriter, is_idle
from onward.frameworks.program.short_forms import Dialect, OperatorArguments
from onward.frameworks.program.sizes import Choices, Shaped, Size, Sizes, as_lists, is_open, on_host, vector
from onward.frameworks.program.source_bundle import SourceBundle
from onward.frameworks.program.source_text import Identifiers, is_identifier, number, quote
from onward.model import Model
from onward.model.core import values
from onward.transform.inline import inline
from onward.transform.types import fill_in_types

_RUNTIME = "onward.frameworks.jax.runtime"
_MAKE_ARRAYS = ("Shape", "Size", "ConstantOfShape", "Range")  # return numpy arrays
_DRAW = (
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
)  # fmt: skip
_CAPITALS = (  # names in a program, besides operators
    "Any", "ClassVar", "ExactState", "ExecutedState", "HERE", "Mapping", "NamedTuple", "Path", "TYPES", "Values",
)  # fmt: skip
_FEW = 64  # larger arrays are computed when the program runs


class GraphPrinter:
    """Printer of graphs as functions, which collects the operators that they call."""

    def __init__(self, own: SourceBundle):
        self.own = own
        self.constants: dict[str, np.ndarray] = {}  # too large for the source
        self._stored, self._called = Names(["__metadata__"]), Identifiers(_CAPITALS)
        self._operators: dict[str, str] = {}

    def body(
        self, model: Model, expressions: Mapping[str, str], stores: Mapping[str, str] | None = None
    ) -> tuple[list[str], dict[str, str]]:
        """Return the statements that compute a model, which is changed, and the expressions of its
        outputs.

        `expressions` are its inputs; `stores` are targets to which outputs are assigned, by name.
        """
        functions = [f"{domain}.{name}" for domain, name, _ in model.functions]
        model = inline(model, [name for name in functions if name not in rows()])
        fill_in_types(model, values(model.graph))
        framework = _OneByOne()
        plan, recorder = make_plan(model, framework), _Recorder(self, framework)
        recorder.open(plan, expressions)
        recorder.record(plan)
        stored_values = {value: target for value in plan.outputs if (target := (stores or {}).get(value.name or ""))}
        plan.outputs = [value for value in plan.outputs if value not in stored_values]
        lines, texts = recorder.statements(plan.outputs, expressions.values(), named=True, stores=stored_values)
        return lines, {value.name or "": text for value, text in zip(plan.outputs, texts, strict=True)}

    def helper(self, name: str) -> str:
        return self.own.define(_RUNTIME, name)

    def operator(self, name: str) -> str:
        """Return the name of the function of an operator, of JAX or defined for it."""
        row = rows()[name]
        if (library := row.library) is not None:
            module, _, name = library.partition(".")
            return f"{self.own.define(row.module, module)}.{name}"  # of an imported module
        if name not in self._operators:
            self._operators[name] = self._called.fresh(short(name))
            define(self.own, name, self._operators[name])
        return self._operators[name]

    def stored(self, name: str, array: np.ndarray) -> str:
        """Return a constant in the file of the program."""
        if str(array.dtype) not in TYPES:
            raise UnsupportedError(f"the constant `{name}` is of the type {array.dtype}, which a file cannot hold")
        for name_of_other, other in self.constants.items():
            if other is array:
                return f"constants[{quote(name_of_other)}]"
        unique = self._stored.fresh(name or "constant")
        self.constants[unique] = array
        return f"constants[{quote(unique)}]"


class JaxPrinter(printing.Printer):
    """Printer that writes plain numbers next to arrays: JAX gives them the type of the array."""

    special = "np"

    def operand(self, value: Any, other: Any) -> Expression:
        array = value.array if isinstance(value, Value) else None
        neighbor = other.tensor if isinstance(other, Value) and other.array is None else None
        if array is None or neighbor is None or neighbor.dtype != str(array.dtype):
            return self.value(value)
        is_number = array.size == 1 and array.ndim <= len(neighbor.shapes[0])
        return Expression(number(array.flat[0], "np")) if is_number else self.value(value)


class _OneByOne(Jax):
    """JAX that calls each operator of a graph."""

    fuses: ClassVar[Sequence[str]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.on_host = on_host({}, self.tensor)


class _Recorder:
    """Recorder of the calls of a function, or of a nested one."""

    def __init__(self, printer: GraphPrinter, framework: Jax):
        self._printer = printer
        self._framework = framework
        self._sizes = Sizes()
        # Arrays, some with dynamic sizes as elements; values of the program; and lists of these for sequences.
        self._values: dict[ir.Value, Any] = {}
        self._constants: dict[int, Value] = {}
        self._written: dict[Any, ProgramStep] = {}
        self.arrays: set[Value] = set()  # numpy arrays when the program runs, or possibly

    def open(self, plan: Plan, expressions: Mapping[str, str]) -> None:
        """Add the inputs as expressions."""
        choices = Choices(batch_first=False)
        names = Identifiers([*MENTIONED, *expressions.values()])
        for name, value in plan.inputs.items():
            argument = Value(path=expressions[name])
            if value.shape is not None and value.dtype is not None:
                argument.tensor = Shaped(choices.shapes(value), str(value.dtype.numpy()))
                if is_identifier(expressions[name]):
                    self._sizes.name(argument, [_dim(names, size) for size in value.shape], lambda x: (".shape", [x]))
            self._values[value] = argument

    def statements(
        self,
        outputs: Sequence[ir.Value],
        taken: Collection[str],
        *,
        named: bool = False,
        stores: Mapping[ir.Value, str] | None = None,
    ) -> tuple[list[str], list[str]]:
        """Return statements, and the expressions of outputs; with `named`, all are variables."""
        results = [self._one(value) for value in outputs]
        assignments = [
            ProgramStep("=", [Value(path=target), self.value(value)]) for value, target in (stores or {}).items()
        ]
        steps = with_stores(in_order(results), assignments)
        written = FunctionWriter(
            fold_repeats(steps, results),
            results * 2 if named else results,
            {},
            JaxPrinter,
            self._place,
            taken=[*MENTIONED, *taken],
            roles=self._sizes.roles,
        )
        return written.lines(), [written.name(value).text for value in results]

    def _place(self, value: Value) -> Expression:
        if value.array is None:
            return Expression(value.path)
        return Expression(literal(value.array) or self._printer.stored(value.name, value.array))

    def value(self, value: ir.Value) -> Any:
        """Return the value of the program for a value of the graph; a list for a sequence."""
        recorded = self._values[value]
        if isinstance(recorded, list):
            return [self._placed(x, value.name or "") if isinstance(x, np.ndarray) else x for x in recorded]
        return self._placed(recorded, value.name or "") if isinstance(recorded, np.ndarray) else recorded

    def _one(self, value: ir.Value) -> Value:
        recorded = self.value(value)
        return self._result(ProgramStep("list", [recorded])) if isinstance(recorded, list) else recorded

    def _placed(self, array: np.ndarray, name: str = "") -> Value:
        """Return an array as a value of the program."""
        if is_open(array):
            return self._result(ProgramStep("np.array", [as_lists(array), Expression("np.int64")]))
        if id(array) not in self._constants:
            tensor = Shaped((array.shape, array.shape), str(array.dtype))
            self._constants[id(array)] = Value(array=array, name=name, tensor=tensor)
            self.arrays.add(self._constants[id(array)])
        return self._constants[id(array)]

    def _result(self, step: ProgramStep) -> Value:
        """Return the single result of a call."""
        step = self._shared(step)
        if not step.results:
            step.results = [Value(step=step)]
        if step.function in ("np.array", "at_once"):
            self.arrays.add(step.results[0])
        return step.results[0]

    def _shared(self, step: ProgramStep) -> ProgramStep:
        """Return an equal earlier call, or this one."""
        return step if step.bodies else self._written.setdefault(call_key(step), step)

    def record(self, plan: Plan) -> None:
        self._values.update(plan.constants)
        for item in plan.items:
            assert isinstance(item, Call), item
            if not self._fold(item):
                self._call(item)

    def _fold(self, call: Call) -> bool:
        """Compute results that are known when writing, also as formulas of sizes."""
        arguments = [self._values[value] for value in call.inputs if value is not None]
        if call.operator == "Identity" and call.outputs[0] is not None:
            self._values[call.outputs[0]] = arguments[0]
            return True
        if call.operator in ("Shape", "Size") and isinstance(arguments[0], Value) and arguments[0].tensor:
            sizes, attributes = self._sizes.of(arguments[0]), _attributes(call)
            whole = vector(sizes[attributes.get("start") or 0 : attributes.get("end")])
            if call.operator == "Size":
                size = np.prod(whole)
                whole = np.array(size, object) if isinstance(size, Size) else np.asarray(size)
            self._set(call, [whole])
            return True
        if call.operator in sequence.operators and _has_known_elements(call, arguments):
            assert call.function is not None
            self._set(call, [call.function(*arguments)])
            return True
        if not arguments or call.on_host is None or call.graphs or call.operator in _DRAW:
            return False
        if not all(isinstance(x, np.ndarray) for x in _flat(arguments)) or counts_far(call.operator, arguments):
            return False
        if any(map(is_open, arguments)) and not _is_certain(call, arguments):
            return False
        try:
            results = call.on_host(*(None if value is None else self._values[value] for value in call.inputs))
        except NotImplementedError:
            return False
        results = results if isinstance(results, tuple) else (results,)
        if not all(isinstance(x, np.ndarray | np.generic) and x.size <= _FEW for x in _flat(results)):
            return False
        self._set(call, [x if isinstance(x, list) else np.asarray(x) for x in results])
        return True

    def _set(self, call: Call, results: Sequence[Any]) -> None:
        for value, result in zip(call.outputs, results, strict=False):
            if value is not None:
                self._values[value] = result

    def _call(self, call: Call) -> None:
        if call.operator in ONLY_ON_HOST:
            raise UnsupportedError(f"{call.described} cannot be computed by JAX")
        arguments = [None if value is None else self._values[value] for value in call.inputs]
        bodies = {name: self._nested(call, plan) for name, plan in call.graphs.items()}
        present = [x for x in arguments if x is not None]
        at_once = (
            bool(present) and not bodies and all(isinstance(x, np.ndarray) or x in self.arrays for x in _flat(present))
        )
        if call.operator == "Expand" and is_open(arguments[1]) and isinstance(arguments[0], np.ndarray):
            at_once = at_once and arguments[0].dtype.kind != "f"  # not a tensor of sizes
        results, is_tuple = (None, None) if at_once or bodies else self._shapes(call, arguments)
        step = None if at_once or bodies else self._short(call, arguments, results)
        if isinstance(step, Value):
            self._set(call, [step])
            return
        step = step or self._operator(call, bodies, at_once)
        if not bodies and is_tuple is None and _may_return_several(call):
            inner = self._result(step)
            step, is_tuple = ProgramStep(self._printer.helper("several"), [inner]), True
            step.pattern = ", ".join([*["{}"] * len(call.outputs), "*_"])
        if call.operator == "SplitToSequence" and results is not None:
            step = self._shared(step)
            if not step.results:
                step.is_tuple = True
                step.results = [Value(tensor, step=step) for tensor in results]
            self._set(call, [list(step.results)])
            return
        has_several = bool(bodies or is_tuple) or (is_tuple is None and call.operator in ("Split", "TopK"))
        self._add(call, step, results, is_tuple=has_several)
        if at_once or call.operator in _MAKE_ARRAYS:
            self.arrays.update(self.value(value) for value in call.outputs if value is not None)

    def _add(self, call: Call, step: ProgramStep, shapes: Sequence[Shaped] | None, *, is_tuple: bool) -> None:
        """Record a call, and its results."""
        step = step if call.operator in _DRAW else self._shared(step)
        if not step.results:
            count = len(shapes or call.outputs)
            used = [i for i, value in enumerate(call.outputs) if value is not None]
            step.is_tuple = is_tuple and (len(used) > 1 or bool(step.bodies or step.pattern))
            step.item = used[0] if is_tuple and not step.is_tuple else None
            step.results = [Value(step=step) for _ in range(count if step.is_tuple else 1)]
            shapes = shapes and shapes[step.item or 0 :]
            for value, tensor in zip(step.results, shapes or (), strict=False):
                value.tensor = tensor
        self._set(call, step.results if step.item is None else step.results * (step.item + 1))

    def _shapes(self, call: Call, arguments: Sequence[Any]) -> tuple[list[Shaped] | None, bool | None]:
        """Return the shapes of results, if JAX can tell, and True if there are several."""
        hosted = HOST_INPUTS.get(call.operator, ())
        unknown = any(x.tensor is None for x in _flat(arguments) if isinstance(x, Value))
        if unknown or any(isinstance(arguments[i], Value) for i in hosted if i < len(arguments)):
            return None, None
        try:
            with self._framework.active():
                choices = [self._shape(call, arguments, choice) for choice in (0, 1)]
        except Exception as error:  # JAX raises different errors for unknown numbers
            if is_ours(error):
                raise
            return None, None
        is_tuple, is_sequence = (isinstance(choices[0], container) for container in (tuple, list))
        if is_sequence and len(choices[0]) != len(choices[1]):
            return None, False
        pairs = zip(*choices, strict=True) if is_tuple or is_sequence else [tuple(choices)]
        return [Shaped((tuple(a.shape), tuple(b.shape)), str(a.dtype)) for a, b in pairs], is_tuple

    def _shape(self, call: Call, arguments: Sequence[Any], choice: int) -> Any:
        hosted, function = HOST_INPUTS.get(call.operator, ()), call.function
        assert function is not None

        def compute(*tensors: Any) -> Any:
            remaining = iter(tensors)

            def filled(x: Any, on_host: bool) -> Any:
                if isinstance(x, list):
                    return [filled(item, on_host) for item in x]
                if isinstance(x, Value):
                    return next(remaining)
                array = x
                if is_open(x):
                    numbers = [size.value.pair[choice] if isinstance(size, Size) else size for size in x.flat]
                    array = np.array(numbers, np.int64).reshape(x.shape)
                return array if on_host or x is None else jnp.asarray(array)

            return function(*(filled(x, i in hosted) for i, x in enumerate(arguments)))

        tensors = [x.tensor for x in _flat(arguments) if isinstance(x, Value)]
        structs = (jax.ShapeDtypeStruct(tensor.shapes[choice], tensor.dtype) for tensor in tensors)
        return jax.eval_shape(compute, *structs)

    def _short(
        self, call: Call, arguments: Sequence[Any], results: Sequence[Shaped] | None
    ) -> ProgramStep | Value | None:
        inputs = [None if value is None else self.value(value) for value in call.inputs]
        constants = [as_lists(x) if isinstance(x, np.ndarray) else None for x in arguments]
        first = inputs[0] if inputs else None
        shape = self._sizes.of(first) if isinstance(first, Value) and first.tensor else None
        result = self._sizes.of(Value(tensor=results[0])) if results and call.operator == "Expand" else None
        dtype = call.inputs[0].dtype if call.inputs and call.inputs[0] is not None else None
        is_float = dtype is not None and dtype.is_floating_point()
        return _DIALECT.short_form(
            call.operator, OperatorArguments(inputs, constants, _attributes(call), shape, result), is_float
        )

    def _operator(self, call: Call, bodies: Mapping[str, Body], at_once: bool) -> ProgramStep:
        printer, on_host = self._printer, HOST_INPUTS.get(call.operator, ())
        library, function = rows()[call.operator].library, printer.operator(call.operator)
        arguments: list[Any] = []
        for i, value in enumerate(call.inputs):
            argument = None if value is None else self.value(value)
            if call.operator == "Conv" and i == 2 and argument is not None and argument.array is not None:
                argument = argument if argument.array.any() else None  # exporters write zeros for no bias
            if isinstance(argument, Value) and not at_once and not bodies:
                is_array, is_number = argument in self.arrays, argument.array is not None and argument.array.ndim == 0
                if i in on_host and not is_array:
                    argument = self._result(
                        ProgramStep(printer.own.define("onward.engines.jax.types", "concrete_array"), [argument])
                    )
                elif i not in on_host and is_array and library is None and not is_number:
                    argument = self._result(ProgramStep("jnp.asarray", [argument]))
            arguments.append(argument)
        usual = defaults(call.operator)
        texts = {name: attribute(name, value) for name, value in _attributes(call).items() if value is not None}
        named: dict[str, Any] = {
            name: Expression(text)
            for name, text in texts.items()
            if usual.get(name) != text
            and not (is_idle(name, _attributes(call)[name]) and is_optional(call.operator, name))
        }
        if bodies:
            named["framework"] = Expression(printer.helper("Values"))
        while arguments and arguments[-1] is None:
            arguments.pop()
        if at_once:
            return ProgramStep(printer.helper("at_once"), [Expression(function), *arguments], named)
        return ProgramStep(function, arguments, named, bodies=dict(bodies))

    def _nested(self, call: Call, plan: Plan) -> Body:
        """Return a nested graph as a function that is defined before the call."""
        arguments = {value: Value() for value in plan.inputs.values()}
        inner = _Recorder(self._printer, self._framework)
        inner._sizes, inner._constants, inner._written = self._sizes, self._constants, dict(self._written)
        inner._values = {**self._values, **arguments}
        inner.arrays = {*self.arrays, *(arguments.values() if call.operator == "Loop" else ())}
        inner.record(plan)
        outputs = [inner._one(value) for value in plan.outputs]
        outside = {step for value in self._values.values() if isinstance(value, Value) for step in in_order([value])}
        outside |= {step for size in self._sizes.roles for step in in_order([size])}
        steps = [step for step in in_order(outputs) if step not in outside]
        types = f"{{}}.types = [{', '.join(map(type_literal, plan.outputs))}]"
        return Body(list(arguments.values()), steps, outputs, types if call.operator == "Loop" else "")


def _cast(call: OperatorArguments, _: Mapping[str, str]) -> ProgramStep | None:
    dtype = plain_type(call.attributes["to"])
    return None if dtype is None else ProgramStep(".astype", [call.inputs[0], Expression(dtype)])


_DIALECT = Dialect(
    {
        **{name: f"jnp.{name}" for name in ("sum", "mean", "squeeze", "expand_dims", "concatenate", "broadcast_to")},
        **{"reshape": ".reshape", "transpose": ".transpose", "T": ".T", "log_softmax": "jax.nn.log_softmax"},
    },
    {"Cast": _cast},
)


def _dim(names: Identifiers, size: Any) -> str | None:
    if isinstance(size, int) or size.value is None:
        return None
    plain = identifier(str(size.value))
    return names.fresh(f"{plain}_size" if plain in MENTIONED else plain)


def _flat(arguments: Iterable[Any]) -> list[Any]:
    """Return arguments, with sequences replaced by their elements."""
    return [item for x in arguments for item in (x if isinstance(x, list) else [x])]


def _has_known_elements(call: Call, arguments: Sequence[Any]) -> bool:
    """True if the elements of a sequence, or the index of one, are known."""
    if call.operator in ("SequenceConstruct", "SequenceEmpty"):
        return True
    indices = [arguments[i] for i in HOST_INPUTS.get(call.operator, ()) if i < len(arguments)]
    is_known = all(isinstance(index, np.ndarray) and not is_open(index) for index in indices)
    return bool(arguments) and isinstance(arguments[0], list) and is_known


def _is_certain(call: Call, arguments: Sequence[np.ndarray]) -> bool:
    """True if the result is the same formula for all sizes."""
    if call.operator == "Equal":
        return all(isinstance(x, Size) or x < 0 for array in arguments for x in array.flat)
    if call.operator in ("Cast", "CastLike"):
        return bool(_attributes(call).get("to") == ir.DataType.INT64)
    return True


def _attributes(call: Call) -> dict[str, Any]:
    """Return the attributes that the row takes."""
    return dict(call.function.keywords) if isinstance(call.function, functools.partial) else {}


def _may_return_several(call: Call) -> bool:
    domain, _, name = call.operator.rpartition(".")
    schema = defs.get_schema(name, domain=domain) if defs.has(name, domain=domain) else None
    return schema is not None and schema.max_output > 1 and not call.graphs and name not in ("Split", "TopK")
