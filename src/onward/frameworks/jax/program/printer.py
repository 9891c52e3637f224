"""A graph as the body of a Python function: calls of JAX, and of operators whose source is copied."""

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
_MAKE_ARRAYS = ("Shape", "Size", "ConstantOfShape", "Range")
"""What they return is of numpy."""
_DRAW = (
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
)  # fmt: skip
_CAPITALS = (
    "Any", "ClassVar", "ExactState", "ExecutedState", "HERE", "Mapping", "NamedTuple", "Path", "TYPES", "Values",
)  # fmt: skip
"""What else begins so in a program."""
_FEW = 64
"""Arrays with more elements than this are computed when the program runs."""


class GraphPrinter:
    """Writes graphs as functions; the operators that they call are collected on the way."""

    def __init__(self, own: SourceBundle):
        self.own = own
        self.constants: dict[str, np.ndarray] = {}
        """What is too large to be written out."""
        self._stored, self._called = Names(["__metadata__"]), Identifiers(_CAPITALS)
        self._operators: dict[str, str] = {}

    def body(
        self, model: Model, given: Mapping[str, str], stores: Mapping[str, str] | None = None
    ) -> tuple[list[str], dict[str, str]]:
        """The statements that compute a model, and its outputs; its inputs are expressions. The
        model is changed.

        `stores` says where some outputs are kept, by their names.
        """
        called = [f"{domain}.{name}" for domain, name, _ in model.functions]
        model = inline(model, [name for name in called if name not in rows()])
        fill_in_types(model, values(model.graph))
        framework = _OneByOne()
        plan, recorder = make_plan(model, framework), _Recorder(self, framework)
        recorder.open(plan, given)
        recorder.record(plan)
        kept = {value: place for value in plan.outputs if (place := (stores or {}).get(value.name or ""))}
        plan.outputs = [value for value in plan.outputs if value not in kept]
        lines, texts = recorder.statements(plan.outputs, given.values(), named=True, stores=kept)
        return lines, {value.name or "": text for value, text in zip(plan.outputs, texts, strict=True)}

    def helper(self, name: str) -> str:
        return self.own.define(_RUNTIME, name)

    def operator(self, name: str) -> str:
        """What computes an operator: a function of JAX, or one that is defined for it."""
        row = rows()[name]
        if (library := row.library) is not None:
            module, _, name = library.partition(".")
            return f"{self.own.define(row.module, module)}.{name}"  # which is imported
        if name not in self._operators:
            self._operators[name] = self._called.fresh(short(name))
            define(self.own, name, self._operators[name])
        return self._operators[name]

    def stored(self, name: str, array: np.ndarray) -> str:
        """A constant of the file, by a name of its own."""
        if str(array.dtype) not in TYPES:
            raise UnsupportedError(f"the constant `{name}` is of the type {array.dtype}, which a file cannot hold")
        for known, other in self.constants.items():
            if other is array:
                return f"constants[{quote(known)}]"
        fresh = self._stored.fresh(name or "constant")
        self.constants[fresh] = array
        return f"constants[{quote(fresh)}]"


class JaxPrinter(printing.Printer):
    """Numbers stand beside arrays of their type as they are: JAX gives them that type."""

    special = "np"

    def operand(self, given: Any, other: Any) -> Expression:
        array = given.array if isinstance(given, Value) else None
        beside = other.tensor if isinstance(other, Value) and other.array is None else None
        if array is None or beside is None or beside.dtype != str(array.dtype):
            return self.value(given)
        is_number = array.size == 1 and array.ndim <= len(beside.shapes[0])
        return Expression(number(array.flat[0], "np")) if is_number else self.value(given)


class _OneByOne(Jax):
    """JAX, in which all that stands in a graph is called."""

    fuses: ClassVar[Sequence[str]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.on_host = on_host({}, self.tensor)


class _Recorder:
    """The calls of one function, or of one that is defined in it."""

    def __init__(self, printer: GraphPrinter, framework: Jax):
        self._printer = printer
        self._framework = framework
        self._sizes = Sizes()
        self._values: dict[ir.Value, Any] = {}
        """Arrays, some of which have sizes in them; what the program computes; and sequences as
        lists of these.
        """
        self._constants: dict[int, Value] = {}
        self._written: dict[Any, ProgramStep] = {}
        self.arrays: set[Value] = set()
        """What is of numpy when the program runs, or may be."""

    def open(self, plan: Plan, given: Mapping[str, str]) -> None:
        """Have the inputs, as the expressions that are given."""
        choices = Choices(batch_first=False)
        names = Identifiers([*MENTIONED, *given.values()])
        for name, value in plan.inputs.items():
            made = Value(path=given[name])
            if value.shape is not None and value.dtype is not None:
                made.tensor = Shaped(choices.shapes(value), str(value.dtype.numpy()))
                if is_identifier(given[name]):
                    self._sizes.name(made, [_dim(names, size) for size in value.shape], lambda x: (".shape", [x]))
            self._values[value] = made

    def inner(self, arguments: Mapping[ir.Value, Value], arrays: Collection[Value]) -> _Recorder:
        """A recorder for a function within this one."""
        made = _Recorder(self._printer, self._framework)
        made._sizes, made._constants, made._written = self._sizes, self._constants, dict(self._written)
        made._values = {**self._values, **arguments}
        made.arrays = {*self.arrays, *arrays}
        return made

    # ---- the result --------------------------------------------------------------------------------------------------

    def statements(
        self,
        outputs: Sequence[ir.Value],
        taken: Collection[str],
        *,
        named: bool = False,
        stores: Mapping[ir.Value, str] | None = None,
    ) -> tuple[list[str], list[str]]:
        """Lines, and the expressions for outputs; they have names if they are needed more than
        once.
        """
        found = [self._one(value) for value in outputs]
        kept = [ProgramStep("=", [Value(path=place), self.value(value)]) for value, place in (stores or {}).items()]
        steps = with_stores(in_order(found), kept)
        written = FunctionWriter(
            fold_repeats(steps, found),
            found * 2 if named else found,
            {},
            JaxPrinter,
            self._place,
            taken=[*MENTIONED, *taken],
            roles=self._sizes.roles,
        )
        return written.lines(), [written.name(value).text for value in found]

    def _place(self, value: Value) -> Expression:
        if value.array is None:
            return Expression(value.path)
        return Expression(literal(value.array) or self._printer.stored(value.name, value.array))

    def value(self, value: ir.Value) -> Any:
        """Return what the program has for a value of the graph; for a sequence, a list."""
        found = self._values[value]
        if isinstance(found, list):
            return [self._placed(x, value.name or "") if isinstance(x, np.ndarray) else x for x in found]
        return self._placed(found, value.name or "") if isinstance(found, np.ndarray) else found

    def _one(self, value: ir.Value) -> Value:
        """Return the same as one value of the program."""
        found = self.value(value)
        return self._made(ProgramStep("list", [found])) if isinstance(found, list) else found

    def _placed(self, array: np.ndarray, name: str = "") -> Value:
        """An array as a part of the program."""
        if is_open(array):
            return self._made(ProgramStep("np.array", [as_lists(array), Expression("np.int64")]))
        if id(array) not in self._constants:
            tensor = Shaped((array.shape, array.shape), str(array.dtype))
            self._constants[id(array)] = Value(array=array, name=name, tensor=tensor)
            self.arrays.add(self._constants[id(array)])
        return self._constants[id(array)]

    def _made(self, step: ProgramStep) -> Value:
        """The one result of a call."""
        step = self._known(step, draws=False)
        if not step.results:
            step.results = [Value(step=step)]
        if step.function in ("np.array", "at_once"):
            self.arrays.add(step.results[0])
        return step.results[0]

    def _known(self, step: ProgramStep, draws: bool) -> ProgramStep:
        """The same call, if it was made before."""
        if draws or step.bodies:
            return step
        return self._written.setdefault(call_key(step), step)

    # ---- calls -------------------------------------------------------------------------------------------------------

    def record(self, plan: Plan) -> None:
        self._values.update(plan.constants)
        for item in plan.items:
            assert isinstance(item, Call), item
            if not self._fold(item):
                self._call(item)

    def _fold(self, call: Call) -> bool:
        """Compute what is known when the program is written; what follows from sizes is known as a
        formula.
        """
        given = [self._values[value] for value in call.inputs if value is not None]
        if call.operator == "Identity" and call.outputs[0] is not None:
            self._values[call.outputs[0]] = given[0]
            return True
        if call.operator in ("Shape", "Size") and isinstance(given[0], Value) and given[0].tensor:
            sizes, attributes = self._sizes.of(given[0]), _attributes(call)
            whole = vector(sizes[attributes.get("start") or 0 : attributes.get("end")])
            if call.operator == "Size":
                size = np.prod(whole)
                whole = np.array(size, object) if isinstance(size, Size) else np.asarray(size)
            self._set(call, [whole])
            return True
        if call.operator in sequence.operators and _has_known_elements(call, given):
            assert call.function is not None
            self._set(call, [call.function(*given)])
            return True
        if not given or call.on_host is None or call.graphs or call.operator in _DRAW:
            return False
        if not all(isinstance(x, np.ndarray) for x in _flat(given)) or counts_far(call.operator, given):
            return False
        if any(map(is_open, given)) and not _is_certain(call, given):
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
        found = [None if value is None else self._values[value] for value in call.inputs]
        bodies = {name: self._nested(call, plan) for name, plan in call.graphs.items()}
        given = [x for x in found if x is not None]
        at_once = (
            bool(given) and not bodies and all(isinstance(x, np.ndarray) or x in self.arrays for x in _flat(given))
        )
        if call.operator == "Expand" and is_open(found[1]) and isinstance(found[0], np.ndarray):
            at_once = at_once and found[0].dtype.kind != "f"  # a tensor of numbers, which say nothing about sizes
        results, is_tuple = (None, None) if at_once or bodies else self._shapes(call, found)
        step = None if at_once or bodies else self._short(call, found, results)
        if isinstance(step, Value):
            self._set(call, [step])
            return
        step = step or self._operator(call, bodies, at_once)
        if not bodies and is_tuple is None and _may_return_several(call):
            inner = self._made(step)
            step, is_tuple = ProgramStep(self._printer.helper("several"), [inner]), True
            step.pattern = ", ".join([*["{}"] * len(call.outputs), "*_"])
        several = is_tuple is None and call.operator in ("Split", "TopK")
        if call.operator == "SplitToSequence" and results is not None:
            self._set(call, [self._elements(step, results)])
            return
        self._add(call, step, results, is_tuple=bool(bodies or is_tuple or several))
        if at_once or call.operator in _MAKE_ARRAYS:
            self.arrays.update(self.value(value) for value in call.outputs if value is not None)

    def _elements(self, step: ProgramStep, shapes: Sequence[Shaped]) -> list[Value]:
        """Have a call that returns a sequence, and each of its elements."""
        step = self._known(step, draws=False)
        if not step.results:
            step.is_tuple = True
            step.results = [Value(tensor, step=step) for tensor in shapes]
        return list(step.results)

    def _add(self, call: Call, step: ProgramStep, shapes: Sequence[Shaped] | None, *, is_tuple: bool) -> None:
        """Have a call, and its results."""
        step = self._known(step, draws=call.operator in _DRAW)
        if not step.results:
            count = len(shapes or call.outputs)
            wanted = [i for i, value in enumerate(call.outputs) if value is not None]
            step.is_tuple = is_tuple and (len(wanted) > 1 or bool(step.bodies or step.pattern))
            step.item = wanted[0] if is_tuple and not step.is_tuple else None
            step.results = [Value(step=step) for _ in range(count if step.is_tuple else 1)]
            shapes = shapes and shapes[step.item or 0 :]
            for value, tensor in zip(step.results, shapes or (), strict=False):
                value.tensor = tensor
        self._set(call, step.results if step.item is None else step.results * (step.item + 1))

    def _shapes(self, call: Call, given: Sequence[Any]) -> tuple[list[Shaped] | None, bool | None]:
        """The shapes of results, if JAX can tell; and whether there are several."""
        hosted = HOST_INPUTS.get(call.operator, ())
        unknown = any(x.tensor is None for x in _flat(given) if isinstance(x, Value))
        if unknown or any(isinstance(given[i], Value) for i in hosted if i < len(given)):
            return None, None
        try:
            with self._framework.active():
                made = [self._shape(call, given, choice) for choice in (0, 1)]
        except Exception as error:  # JAX says in many ways that it needs to know numbers
            if is_ours(error):
                raise
            return None, None
        is_tuple, is_sequence = (isinstance(made[0], kind) for kind in (tuple, list))
        if is_sequence and len(made[0]) != len(made[1]):
            return None, False
        pairs = zip(*made, strict=True) if is_tuple or is_sequence else [tuple(made)]
        return [Shaped((tuple(a.shape), tuple(b.shape)), str(a.dtype)) for a, b in pairs], is_tuple

    def _shape(self, call: Call, given: Sequence[Any], choice: int) -> Any:
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
                    numbers = [each.value.pair[choice] if isinstance(each, Size) else each for each in x.flat]
                    array = np.array(numbers, np.int64).reshape(x.shape)
                return array if on_host or x is None else jnp.asarray(array)

            return function(*(filled(x, i in hosted) for i, x in enumerate(given)))

        tensors = [x.tensor for x in _flat(given) if isinstance(x, Value)]
        kinds = (jax.ShapeDtypeStruct(tensor.shapes[choice], tensor.dtype) for tensor in tensors)
        return jax.eval_shape(compute, *kinds)

    def _short(self, call: Call, found: Sequence[Any], results: Sequence[Shaped] | None) -> ProgramStep | Value | None:
        inputs = [None if value is None else self.value(value) for value in call.inputs]
        known = [as_lists(x) if isinstance(x, np.ndarray) else None for x in found]
        first = inputs[0] if inputs else None
        shape = self._sizes.of(first) if isinstance(first, Value) and first.tensor else None
        result = self._sizes.of(Value(tensor=results[0])) if results and call.operator == "Expand" else None
        dtype = call.inputs[0].dtype if call.inputs and call.inputs[0] is not None else None
        is_float = dtype is not None and dtype.is_floating_point()
        return _DIALECT.short_form(
            call.operator, OperatorArguments(inputs, known, _attributes(call), shape, result), is_float
        )

    def _operator(self, call: Call, bodies: Mapping[str, Body], at_once: bool) -> ProgramStep:
        printer, on_host = self._printer, HOST_INPUTS.get(call.operator, ())
        library, function = rows()[call.operator].library, printer.operator(call.operator)
        arguments: list[Any] = []
        for i, value in enumerate(call.inputs):
            given = None if value is None else self.value(value)
            if call.operator == "Conv" and i == 2 and given is not None and given.array is not None:
                given = given if given.array.any() else None  # exporters write zeros for no bias
            if isinstance(given, Value) and not at_once and not bodies:
                is_array, is_number = given in self.arrays, given.array is not None and given.array.ndim == 0
                if i in on_host and not is_array:
                    given = self._made(
                        ProgramStep(printer.own.define("onward.engines.jax.types", "concrete_array"), [given])
                    )
                elif i not in on_host and is_array and library is None and not is_number:
                    given = self._made(ProgramStep("jnp.asarray", [given]))
            arguments.append(given)
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
        """A nested graph, as a function that is defined before the call."""
        arguments = {value: Value() for value in plan.inputs.values()}
        inner = self.inner(arguments, arguments.values() if call.operator == "Loop" else ())
        inner.record(plan)
        outputs = [inner._one(value) for value in plan.outputs]
        outside = {step for value in [*self._values.values()] if isinstance(value, Value) for step in in_order([value])}
        outside |= {step for size in self._sizes.roles for step in in_order([size])}
        steps = [step for step in in_order(outputs) if step not in outside]
        types = f"{{}}.types = [{', '.join(map(type_literal, plan.outputs))}]"
        return Body(list(arguments.values()), steps, outputs, types if call.operator == "Loop" else "")


def _cast(given: OperatorArguments, _: Mapping[str, str]) -> ProgramStep | None:
    dtype = plain_type(given.attributes["to"])
    return None if dtype is None else ProgramStep(".astype", [given.inputs[0], Expression(dtype)])


_DIALECT = Dialect(
    {
        **{name: f"jnp.{name}" for name in ("sum", "mean", "squeeze", "expand_dims", "concatenate", "broadcast_to")},
        **{"reshape": ".reshape", "transpose": ".transpose", "T": ".T", "log_softmax": "jax.nn.log_softmax"},
    },
    {"Cast": _cast},
)


def _dim(names: Identifiers, size: Any) -> str | None:
    """What a size is called."""
    if isinstance(size, int) or size.value is None:
        return None
    plain = identifier(str(size.value))
    return names.fresh(f"{plain}_size" if plain in MENTIONED else plain)


def _flat(given: Iterable[Any]) -> list[Any]:
    """Return arguments, with the elements of sequences in the place of these."""
    return [item for x in given for item in (x if isinstance(x, list) else [x])]


def _has_known_elements(call: Call, given: Sequence[Any]) -> bool:
    """True if it is known which elements the result of an operator on sequences has, or which one
    it is.
    """
    if call.operator in ("SequenceConstruct", "SequenceEmpty"):
        return True
    places = [given[i] for i in HOST_INPUTS.get(call.operator, ()) if i < len(given)]
    is_known = all(isinstance(place, np.ndarray) and not is_open(place) for place in places)
    return bool(given) and isinstance(given[0], list) and is_known


def _is_certain(call: Call, given: Sequence[np.ndarray]) -> bool:
    """Whether the result is the same formula whatever sizes are."""
    if call.operator == "Equal":
        return all(isinstance(x, Size) or x < 0 for array in given for x in array.flat)
    if call.operator in ("Cast", "CastLike"):
        return bool(_attributes(call).get("to") == ir.DataType.INT64)
    return True


def _attributes(call: Call) -> dict[str, Any]:
    """As the row asks for them."""
    return dict(call.function.keywords) if isinstance(call.function, functools.partial) else {}


def _may_return_several(call: Call) -> bool:
    domain, _, name = call.operator.rpartition(".")
    schema = defs.get_schema(name, domain=domain) if defs.has(name, domain=domain) else None
    return schema is not None and schema.max_output > 1 and not call.graphs and name not in ("Split", "TopK")
