"""The rows of the engine's table as source; numbers, names and types as source."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx import defs, helper

from onward.engines.framework import FAMILIES
from onward.frameworks.program import source_text
from onward.frameworks.program.source_bundle import SourceBundle, parse_module
from onward.frameworks.program.source_text import Identifiers, quote

_RUNTIME = "onward.frameworks.jax.runtime"
INSTEAD = {
    "onward.engines.step_errors.check_growth": _RUNTIME,
    "onward.engines.jax.elementwise.cast": _RUNTIME,
    "onward.engines.shared.arrays.dtype_of": _RUNTIME,
    "onward.engines.shared.arrays.xp": f"{_RUNTIME}:jnp",
}
"""What of the engine needs more of us than a file should, and where it is written without that."""


class OperatorSource(NamedTuple):
    module: str
    value: ast.expr | str
    """An expression, or the name of a function."""

    @property
    def library(self) -> str | None:
        """The function of JAX that it is, if so; such take arrays of numpy, too."""
        return ast.unparse(self.value) if isinstance(self.value, ast.Attribute) else None


@functools.cache
def rows() -> dict[str, OperatorSource]:
    """By operator: where its row is."""
    found: dict[str, OperatorSource] = {}
    for family in FAMILIES:
        for module in (f"onward.engines.jax.{family}", f"onward.engines.shared.{family}"):
            if importlib.util.find_spec(module) is not None:
                for name, value in _rows_of(parse_module(module)):
                    found.setdefault(name, OperatorSource(module, value))
    return found


def _rows_of(tree: ast.Module) -> Iterator[tuple[str, ast.expr | str]]:
    """`operators(Abs=jnp.abs)`, `operators.define("onward.Linear")(lambda ...)`, and functions
    decorated so.
    """
    for statement in tree.body:
        match statement:
            case ast.Expr(ast.Call(ast.Name("operators"), keywords=keywords)):
                yield from ((str(keyword.arg), keyword.value) for keyword in keywords)
            case ast.Expr(ast.Call(ast.Call(ast.Attribute(ast.Name("operators"), "define"), names), [value])):
                yield from ((str(ast.literal_eval(name)), value) for name in names)
            case ast.FunctionDef(name=function, decorator_list=decorators):
                for decorator in decorators:
                    match decorator:
                        case ast.Call(ast.Attribute(ast.Name("operators"), "define"), names):
                            yield from ((str(ast.literal_eval(name)), function) for name in names)


def short(operator: str) -> str:
    """What an operator is called in a program."""
    return operator.rpartition(".")[2]


def define(own: SourceBundle, operator: str, called: str) -> None:
    """Have the row of an operator under a name.

    Attributes that are as the standard has them need not be given.
    """
    module, value = rows()[operator]
    if isinstance(value, str):
        own.define(module, value, called, defaults(operator))
    else:
        own.name_expression(called, module, value, defaults(operator))


@functools.cache
def defaults(operator: str) -> dict[str, str]:
    """What attributes of an operator are unless they are given, as source; of rows that name their
    attributes.
    """
    asked = _keywords(rows()[operator])
    if "." in operator or not defs.has(operator):
        return {}
    found = {name: x.default_value for name, x in defs.get_schema(operator).attributes.items() if name in asked}
    known = {name: helper.get_attribute_value(value) for name, value in found.items() if value.type}
    return {name: attribute(name, x.decode() if isinstance(x, bytes) else x) for name, x in known.items()}


def is_optional(operator: str, name: str) -> bool:
    """Whether an attribute need not be given."""
    return _keywords(rows()[operator]).get(name) == "None"


def _keywords(row: OperatorSource) -> dict[str, str | None]:
    """Attributes that a row asks for, with its own defaults."""
    node: Any = row.value
    if isinstance(node, str):
        tree = parse_module(row.module)
        node = next(x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == row.value)
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        return {}
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return {argument.arg: None if default is None else ast.unparse(default) for argument, default in pairs}


# ---- numbers and names -----------------------------------------------------------------------------------------------

MENTIONED = (
    "np", "jnp", "jax", "lax", "params", "state", "batch", "inputs", "gradients", "lr", "t", "constants", "at_once",
    "several", "concrete_array", "exact", "metrics", "changed", "count", "exact_clip", "transformation", "joint", "i",
    "statistics", "random",
)  # fmt: skip
"""What a function mentions beside its own variables."""

_FEW = 8
"""Up to so many numbers are written out."""


def identifier(name: str) -> str:
    """A name of the graph as one of Python."""
    return source_text.identifier(name.lower())  # operators are written with capitals


def variables(names: Iterable[str]) -> dict[str, str]:
    """A variable for each name of a graph."""
    taken = Identifiers(MENTIONED)
    return {name: taken.fresh(identifier(name)) for name in names}


def pairs(values: Mapping[str, str]) -> str:
    """The inside of a dictionary."""
    return ", ".join(f"{quote(name)}: {text}" for name, text in values.items())


def literal(array: np.ndarray) -> str | None:
    """Few numbers as they are written."""
    dtype = _numpy_type(array.dtype)
    if dtype is None:
        return None
    if array.size > _FEW:
        is_one = bool((array == array.flat[0]).all())
        return f"np.full({array.shape}, {write_literal(array.flat[0])}, {dtype})" if is_one else None
    if array.ndim == 0:
        return f"{dtype}({write_literal(array)})"
    if array.size == 0:
        return f"np.zeros({array.shape}, {dtype})"
    return f"np.array({write_literal(array)}, {dtype})"


def write_literal(value: Any) -> str:
    return source_text.literal(value, "np")


# ---- types -----------------------------------------------------------------------------------------------------------

_NAME_A_TYPE = ("to", "dtype", "stash_type", "softmax_precision", "output_dtype", "precision", "output_datatype")
"""Attributes that do."""


def type_name(dtype: np.dtype) -> str:
    """How a type is written."""
    return _numpy_type(dtype) or f"jnp.{dtype.name}"


def _numpy_type(dtype: np.dtype) -> str | None:
    """The same if numpy has it."""
    if dtype.kind == "b":
        return "np.bool_"
    return f"np.{dtype.name}" if dtype.kind in "iuf" and hasattr(np, dtype.name) else None


def plain_type(number: int) -> str | None:
    """A type that every number can be converted to in one way."""
    dtype = ir.DataType(number)
    if dtype is ir.DataType.BFLOAT16:
        return "jnp.bfloat16"
    return None if dtype is ir.DataType.STRING else _numpy_type(dtype.numpy())


def attribute(name: str, value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"np.array({write_literal(value)}, {type_name(value.dtype)})"
    if name in _NAME_A_TYPE and isinstance(value, int) and value:
        return quote(str(ir.DataType(value).numpy()))
    return write_literal(list(value) if isinstance(value, tuple) else value)


def type_literal(value: ir.Value) -> str:
    """Type and shape of a value, with None for what is not known."""
    sizes = None if value.shape is None else [size if isinstance(size, int) else None for size in value.shape]
    return f"({None if value.dtype is None else quote(str(value.dtype.numpy()))}, {sizes})"
