"""A graph as the body of a Python function: one line for each node."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import defs

from onward.build import Names
from onward.convert.jax.source.forms import short_form
from onward.convert.jax.source.functions import Functions
from onward.convert.jax.source.literals import (
    MENTIONED,
    attribute,
    call,
    capitalised,
    declared,
    identifier,
    literal,
    variables,
)
from onward.convert.jax.source.operators import define, rows, short
from onward.convert.jax.source.runtime import TYPES
from onward.convert.program.names import Identifiers, quoted
from onward.convert.program.own_source import OwnSource
from onward.engines.framework import Operators
from onward.engines.framework_engine import make_plan
from onward.engines.host import HOST_INPUTS, ONLY_ON_HOST
from onward.engines.jax import Jax
from onward.engines.plan import Call, Plan
from onward.errors import UnsupportedError
from onward.model import Model
from onward.model.core import values
from onward.transform.types import fill_in_types

_RUNTIME = "onward.convert.jax.source.runtime"
_MAKE_ARRAYS = ("Shape", "Size", "ConstantOfShape", "Range")
"""What they return is of numpy."""
_DRAW = (
    "Bernoulli",
    "Dropout",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
)


_CAPITALS = (
    "Any",
    "ClassVar",
    "ExactState",
    "ExecutedState",
    "HERE",
    "Mapping",
    "NamedTuple",
    "Path",
    "TYPES",
    "Values",
)
"""What else begins so in a program."""


class Printer:
    """Writes graphs as functions; the operators that they call are collected on the way."""

    def __init__(self, own: OwnSource):
        self.own = own
        self.constants: dict[str, np.ndarray] = {}
        """What is too large to be written out."""
        self.functions: list[str] = []
        """Definitions of functions of models."""
        self._stored, self._called = Names(["__metadata__"]), Identifiers(_CAPITALS)
        self._operators: dict[str, str] = {}
        self._known: dict[tuple[str, str], str] = {}

    def body(self, model: Model, given: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """The statements that compute a model, and its outputs; its inputs are expressions. The model is changed."""
        body, plan = self._body(model, given, ())
        return body.lines, {value.name or "": body[value] for value in plan.outputs}

    def _body(self, model: Model, given: Mapping[str, str], arrays: Collection[str]) -> tuple[_Body, Plan]:
        functions = Functions(model)
        fill_in_types(model, values(model.graph))
        framework = Jax()
        framework.operators = Operators({**functions.rows(), **framework.operators})
        plan = make_plan(model, framework)
        known = {value: given[name] for name, value in plan.inputs.items()}
        of_numpy = [value for name, value in plan.inputs.items() if name in arrays]
        body = _Body(self, known, Identifiers([*MENTIONED, *given.values()]), functions, of_numpy)
        body.write(plan)
        return body, plan

    def function(self, functions: Functions, call: Call, arrays: Collection[ir.Value]) -> tuple[str, list[bool]]:
        """What a function is called that computes a call of a model's own; and which results are of numpy."""
        model, formals = functions.one_call(call)
        given = variables(formals)
        body, plan = self._body(model, given, [name for name, value in formals.items() if value in arrays])
        lines = [*body.lines, f"return {', '.join(body[value] for value in plan.outputs)}"]
        text = "\n    ".join([f"({', '.join(given.values())}):", *functions.summary(call), *lines])
        name = capitalised(short(call.operator))
        if (name, text) not in self._known:
            self._known[name, text] = self._called.fresh(name)
            self.functions.append(f"def {self._known[name, text]}{text}")
        return self._known[name, text], [value in body.arrays for value in plan.outputs]

    def helper(self, name: str) -> str:
        return self.own.define(_RUNTIME, name)

    def operator(self, name: str) -> str:
        """What computes an operator: a function of JAX, or one that is defined for it."""
        row = rows()[name]
        if (library := row.library) is not None:
            self.own.define(row.module, library.partition(".")[0])  # which is imported
            return library
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
                return f"constants[{quoted(known)}]"
        fresh = self._stored.fresh(name or "constant")
        self.constants[fresh] = array
        return f"constants[{quoted(fresh)}]"


class _Body:
    """The statements of one function."""

    def __init__(
        self,
        printer: Printer,
        known: dict[ir.Value, str],
        names: Names,
        functions: Functions,
        arrays: Iterable[ir.Value],
    ):
        self._printer = printer
        self._known = known
        self._names = names
        self._functions = functions
        self._constants: dict[ir.Value, np.ndarray] = {}
        self.arrays = set(arrays)
        """What is of numpy, or may be."""
        self._written: dict[str, list[str]] = {}
        """Expressions, and what they are called."""
        self.lines: list[str] = []

    def __getitem__(self, value: ir.Value) -> str:
        """The expression for a value."""
        if value not in self._known:
            array = self._constants[value]
            self._known[value] = literal(array) or self._printer.stored(value.name or "", array)
        return self._known[value]

    def write(self, plan: Plan) -> None:
        self.arrays.update(plan.constants)
        self._constants.update(plan.constants)
        for item in plan.items:
            assert isinstance(item, Call), item
            self._call(item)

    def _call(self, call: Call) -> None:
        source, result = call.inputs[0] if call.inputs else None, call.outputs[0]
        if call.operator == "Identity" and source is not None and result is not None and source not in self._constants:
            self._known[result] = self[source]
            self.arrays.update([result] if source in self.arrays else [])
            return
        if self._fold(call):
            return
        if call.operator in ONLY_ON_HOST:
            raise UnsupportedError(f"{call.described} cannot be computed by JAX")
        if call.operator in self._functions:
            self._call_function(call)
            return
        bodies = {name: self._nested(name, call, plan) for name, plan in call.graphs.items()}
        given = [value for value in call.inputs if value is not None]
        at_once = bool(given) and not bodies and all(value in self.arrays for value in given)
        text = self._short(call) if not at_once and not bodies else None
        self._assign(call, text or self._text(call, bodies, at_once))
        if at_once or call.operator in _MAKE_ARRAYS:
            self.arrays.update(value for value in call.outputs if value is not None)

    def _call_function(self, node: Call) -> None:
        name, of_numpy = self._printer.function(self._functions, node, self.arrays)
        self._assign(node, call(name, [self[value] for value in node.inputs if value is not None]))
        made = zip(node.outputs, of_numpy, strict=True)
        self.arrays.update(value for value, is_array in made if value is not None and is_array)

    def _fold(self, call: Call) -> bool:
        """Compute what is constant."""
        given = [value for value in call.inputs if value is not None]
        if not given or call.on_host is None or call.graphs or call.operator in _DRAW:
            return False
        if not all(value in self._constants and self._constants[value].size <= 1 for value in given):
            return False
        arrays = [None if value is None else self._constants[value] for value in call.inputs]
        results = call.on_host(*arrays)
        for value, result in zip(call.outputs, results if isinstance(results, tuple) else (results,), strict=False):
            if value is not None:
                self.arrays.add(value)
                self._constants[value] = np.asarray(result)
        return True

    def _short(self, call: Call) -> str | None:
        inputs = ["None" if value is None else self[value] for value in call.inputs]
        constants = [None if value is None else self._constants.get(value) for value in call.inputs]
        types = [None if value is None else value.dtype for value in call.inputs]
        return short_form(call.operator, inputs, constants, _attributes(call), types)

    def _text(self, node: Call, bodies: Mapping[str, str], at_once: bool) -> str:
        printer, on_host = self._printer, HOST_INPUTS.get(node.operator, ())
        library, function = rows()[node.operator].library, printer.operator(node.operator)
        arguments = []
        for i, value in enumerate(node.inputs):
            text = "None" if value is None else self[value]
            if value is not None and not at_once and not bodies:
                is_array = value in self.arrays
                if i in on_host and not is_array:
                    text = f"{printer.own.define('onward.engines.jax.values', 'known')}({text})"
                elif i not in on_host and is_array and library is None and not self._is_number(value):
                    text = f"jnp.asarray({text})"
            arguments.append(text)
        given = {name: value for name, value in _attributes(node).items() if value is not None}
        arguments += [f"{name}={attribute(name, value)}" for name, value in given.items()]
        arguments += [f"{name}={body}" for name, body in bodies.items()]
        if bodies:
            arguments.append(f"framework={printer.helper('Values')}")
        if at_once:
            return call(printer.helper("at_once"), [function, *arguments])
        return call(function, arguments)

    def _is_number(self, value: ir.Value) -> bool:
        return value in self._constants and self._constants[value].ndim == 0

    def _assign(self, call: Call, text: str) -> None:
        """Names for the results, or those that they have already."""
        several = _may_return_several(call)
        text = f"{self._printer.helper('several')}({text})" if several else text
        targets = self._written.get(text) if call.operator not in _DRAW and not call.graphs else None
        if targets is None or len(targets) < len(call.outputs):
            fresh = (value.name or short(call.operator) if value else "_" for value in call.outputs)
            targets = [name if name == "_" else self._names.fresh(identifier(name)) for name in fresh]
            self._written[text] = targets
            left = ", ".join([*targets, *(["*_"] if several else [])])
            lines = f"{left}{',' * (bool(call.graphs) and len(targets) == 1)} = {text}".splitlines()
            self.lines += lines
        for value, target in zip(call.outputs, targets, strict=False):
            if value is not None:
                self._known[value] = target

    def _nested(self, name: str, call: Call, plan: Plan) -> str:
        """A nested graph, as a function that is defined before the call."""
        function = self._names.fresh(identifier(name))
        arguments = {value: self._names.fresh(identifier(key)) for key, value in plan.inputs.items()}
        may_be_arrays = plan.inputs.values() if call.operator == "Loop" else ()
        known, arrays = {**self._known, **arguments}, {*self.arrays, *may_be_arrays}
        inner = _Body(self._printer, known, self._names, self._functions, arrays)
        inner._constants.update(self._constants)
        inner.write(plan)
        results = ", ".join(inner[value] for value in plan.outputs)
        self.lines += [
            f"def {function}({', '.join(arguments.values())}):",
            *(f"    {line}" for line in [*inner.lines, f"return [{results}]"]),
        ]
        if call.operator == "Loop":
            self.lines.append(f"{function}.types = [{', '.join(map(declared, plan.outputs))}]")
        return function


def _attributes(call: Call) -> dict[str, Any]:
    """As the row asks for them."""
    return dict(call.function.keywords) if isinstance(call.function, functools.partial) else {}


def _may_return_several(call: Call) -> bool:
    domain, _, name = call.operator.rpartition(".")
    schema = defs.get_schema(name, domain=domain) if defs.has(name, domain=domain) else None
    return schema is not None and schema.max_output > 1 and not call.graphs and name not in ("Split", "TopK")
