"""What parameters are reset to: the value in the file, or fresh random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir

from onward.build import Builder, Expr
from onward.errors import RecipeError, UnknownNameError, near_or_first
from onward.model import Model
from onward.model.state import without_tags
from onward.recipe import random
from onward.recipe.assembly import Assembly, register
from onward.recipe.initialize import INITIALIZERS, initializer
from onward.recipe.spec import Spec, parse, split_address
from onward.recipe.trainable import matching
from onward.runtime.sessions import evaluate
from onward.standard import COMMON_OPSET, IR_VERSION

_FILE = "file"


def by_pattern(init: str | Sequence[str] | Mapping[str, Any]) -> str | Mapping[str, Any]:
    """An initialiser for all, or those for some by pattern, where they are given as `SPEC` and `PATTERN=SPEC`."""
    if isinstance(init, Mapping):
        return init
    found: dict[str, str] = {}
    for text in [init] if isinstance(init, str) else init:
        pattern, spec = split_address(text, INITIALIZERS)
        pattern = "*" if pattern is None else pattern
        if pattern in found:
            raise RecipeError(
                f"`{pattern}` is given twice", hint="the first pattern that matches counts; give each once"
            )
        found[pattern] = spec
    everything = found.pop("*", _FILE)  # what is for all comes last, wherever it stood
    return {**found, "*": everything} if found else everything


def check_patterns(init: str | Mapping[str, Any], parameters: Sequence[ir.Value]) -> None:
    """Refuse initialisers for what is not trained."""
    names = [value.name or "" for value in parameters]
    for pattern in init if isinstance(init, Mapping) and "name" not in init else ():
        if pattern != "*" and not matching([pattern], names):
            hint = near_or_first(pattern.strip("*"), names)
            raise UnknownNameError(f"`{pattern}`, which has an initializer, matches no parameter", hint=hint)


def bind_initial_value(assembly: Assembly, value: ir.Value, init: str | Mapping[str, Any]) -> None:
    """Give a state variable of the inference graph its initialization binding."""
    spec = _spec_for(value.name or "", init)
    if spec.name == _FILE:
        assembly.reset(value, lambda op: _copy_of_stored(op, value))
        return
    key = assembly.seed_key()
    assembly.reset(value, lambda op: _fresh(op, value, spec, key))


class Drawn(NamedTuple):
    """A parameter that begins with what an initialiser draws."""

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]
    init: str | Mapping[str, Any] | Spec


def draw_initial_values(parameters: Sequence[Drawn], seed: int) -> list[ir.Tensor]:
    """What parameters are reset to, as tensors; all in one go, since each session takes its time."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": COMMON_OPSET}, name="initialization")
    op = Builder(graph, opset=COMMON_OPSET)
    key = op.constant(random.new_key(seed))
    for name, dtype, shape, init in parameters:
        wide = ir.DataType.DOUBLE if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
        value = ir.Value(name=name, type=ir.TensorType(wide), shape=ir.Shape(shape))
        graph.outputs.append(_fresh(op, value, parse(init), key).value)
    drawn = evaluate(Model(ir.Model(graph, ir_version=IR_VERSION, functions=list(op.functions.values()))))
    return [
        ir.Tensor(numbers.astype(dtype.numpy()), dtype=dtype, name=name)
        for numbers, (name, dtype, _, _) in zip(drawn, parameters, strict=True)
    ]


def _fresh(op: Builder, value: ir.Value, spec: Spec, key: Expr) -> Expr:
    return initializer(spec.name).build(op, random.site_key(op, key, value.name or ""), value, **spec.options)


def _spec_for(name: str, init: str | Mapping[str, Any]) -> Spec:
    """The initialiser for a parameter: one for all, or the first pattern that matches; else the value in the file."""
    if isinstance(init, Mapping) and "name" not in init:
        found = (spec for pattern, spec in init.items() if matching([pattern], [name]))
        return parse(next(found, _FILE))
    return parse(init)


def _copy_of_stored(op: Builder, value: ir.Value) -> Expr:
    """A copy of the parameter as it is now; where its data is outside the file, both refer to the same bytes."""
    assert value.const_value is not None
    return op.Identity(op(register(op, value.name or "", without_tags(value.const_value))))
