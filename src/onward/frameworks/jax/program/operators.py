"""Rows of the engine's table, numbers, names and types as source."""

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
# Definitions of the engine that need too much of Onward -> the modules that replace them in a program.
INSTEAD = {
    "onward.engines.step_errors.check_growth": _RUNTIME,
    "onward.engines.jax.elementwise.cast": _RUNTIME,
    "onward.engines.shared.arrays.dtype_of": _RUNTIME,
    "onward.engines.shared.arrays.xp": f"{_RUNTIME}:jnp",
}


class OperatorSource(NamedTuple):
    module: str
    value: ast.expr | str  # an expression, or the name of a function

    @property
    def library(self) -> str | None:
        """Function of JAX, which also takes numpy arrays; None for another row."""
        return ast.unparse(self.value) if isinstance(self.value, ast.Attribute) else None


@functools.cache
def rows() -> dict[str, OperatorSource]:
    """Return the source of each operator."""
    sources: dict[str, OperatorSource] = {}
    for family in FAMILIES:
        for module in (f"onward.engines.jax.{family}", f"onward.engines.shared.{family}"):
            if importlib.util.find_spec(module) is not None:
                for name, value in _rows_of(parse_module(module)):
                    sources.setdefault(name, OperatorSource(module, value))
    return sources


def _rows_of(tree: ast.Module) -> Iterator[tuple[str, ast.expr | str]]:
    """Yield the rows of `operators(Abs=jnp.abs)` and `operators.define(...)`, with names."""
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
    """Return the name of an operator in a program."""
    return operator.rpartition(".")[2]


def define(own: SourceBundle, operator: str, called: str) -> None:
    """Define the row of an operator under a name. Attributes with default values are optional."""
    module, value = rows()[operator]
    if isinstance(value, str):
        own.define(module, value, called, defaults(operator))
    else:
        own.name_expression(called, module, value, defaults(operator))


@functools.cache
def defaults(operator: str) -> dict[str, str]:
    """Return the default values of the attributes of an operator that its row names, as source."""
    asked = _keywords(rows()[operator])
    if "." in operator or not defs.has(operator):
        return {}
    attributes = {name: x.default_value for name, x in defs.get_schema(operator).attributes.items() if name in asked}
    values = {name: helper.get_attribute_value(value) for name, value in attributes.items() if value.type}
    return {name: attribute(name, x.decode() if isinstance(x, bytes) else x) for name, x in values.items()}


def is_optional(operator: str, name: str) -> bool:
    """True if an attribute may be left out."""
    return _keywords(rows()[operator]).get(name) == "None"


def _keywords(row: OperatorSource) -> dict[str, str | None]:
    """Return the attributes that a row takes, with its own defaults."""
    node: Any = row.value
    if isinstance(node, str):
        tree = parse_module(row.module)
        node = next(x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == row.value)
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        return {}
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return {argument.arg: None if default is None else ast.unparse(default) for argument, default in pairs}


# Names that functions of a program mention, besides their own variables.
MENTIONED = (
    "np", "jnp", "jax", "lax", "params", "state", "batch", "inputs", "gradients", "lr", "t", "constants", "at_once",
    "several", "concrete_array", "exact", "metrics", "changed", "count", "exact_clip", "transformation", "joint", "i",
    "statistics", "random",
)  # fmt: skip
_FEW = 8  # arrays with at most this many numbers are written out


def identifier(name: str) -> str:
    return source_text.identifier(name.lower())  # operators are written with capitals


def variables(names: Iterable[str]) -> dict[str, str]:
    """Return a variable for each name of a graph."""
    taken = Identifiers(MENTIONED)
    return {name: taken.fresh(identifier(name)) for name in names}


def pairs(values: Mapping[str, str]) -> str:
    """Return the inside of a dictionary."""
    return ", ".join(f"{quote(name)}: {text}" for name, text in values.items())


def literal(array: np.ndarray) -> str | None:
    """Return the source of a small or constant array; None for others."""
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


_TYPE_ATTRIBUTES = ("to", "dtype", "stash_type", "softmax_precision", "output_dtype", "precision", "output_datatype")


def type_name(dtype: np.dtype) -> str:
    return _numpy_type(dtype) or f"jnp.{dtype.name}"


def _numpy_type(dtype: np.dtype) -> str | None:
    """Return the name of a numpy type; None for others."""
    if dtype.kind == "b":
        return "np.bool_"
    return f"np.{dtype.name}" if dtype.kind in "iuf" and hasattr(np, dtype.name) else None


def plain_type(number: int) -> str | None:
    """Return a type to which `astype` converts all numbers as Cast does; None for others."""
    dtype = ir.DataType(number)
    if dtype is ir.DataType.BFLOAT16:
        return "jnp.bfloat16"
    return None if dtype is ir.DataType.STRING else _numpy_type(dtype.numpy())


def attribute(name: str, value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"np.array({write_literal(value)}, {type_name(value.dtype)})"
    if name in _TYPE_ATTRIBUTES and isinstance(value, int) and value:
        return quote(str(ir.DataType(value).numpy()))
    return write_literal(list(value) if isinstance(value, tuple) else value)


def type_literal(value: ir.Value) -> str:
    """Return type and shape of a value, with None if unknown."""
    sizes = None if value.shape is None else [size if isinstance(size, int) else None for size in value.shape]
    return f"({None if value.dtype is None else quote(str(value.dtype.numpy()))}, {sizes})"
