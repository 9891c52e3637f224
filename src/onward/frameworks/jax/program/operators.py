"""The rows of the engine's table as source."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

from onnx import defs, helper

from onward.engines.framework import FAMILIES
from onward.frameworks.jax.program.literals import attribute
from onward.frameworks.program.own_source import OwnSource, parse_module

_RUNTIME = "onward.frameworks.jax.runtime"
INSTEAD = {
    "onward.engines.endless_loops.check_growth": _RUNTIME,
    "onward.engines.jax.elementwise.cast": _RUNTIME,
    "onward.engines.shared.arrays.dtype_of": _RUNTIME,
    "onward.engines.shared.arrays.xp": f"{_RUNTIME}:jnp",
}
"""What of the engine needs more of us than a file should, and where it is written without that."""


class Row(NamedTuple):
    module: str
    value: ast.expr | str
    """An expression, or the name of a function."""

    @property
    def library(self) -> str | None:
        """The function of JAX that it is, if so; such take arrays of numpy, too."""
        return ast.unparse(self.value) if isinstance(self.value, ast.Attribute) else None


@functools.cache
def rows() -> dict[str, Row]:
    """By operator: where its row is."""
    found: dict[str, Row] = {}
    for family in FAMILIES:
        for module in (f"onward.engines.jax.{family}", f"onward.engines.shared.{family}"):
            if importlib.util.find_spec(module) is not None:
                for name, value in _rows_of(parse_module(module)):
                    found.setdefault(name, Row(module, value))
    return found


def _rows_of(tree: ast.Module) -> Iterator[tuple[str, ast.expr | str]]:
    """`operators(Abs=jnp.abs)`, `operators.define("onward.Linear")(lambda ...)`, and functions decorated so."""
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


def define(own: OwnSource, operator: str, called: str) -> None:
    """Have the row of an operator under a name. Attributes that are as the standard has them need not be given."""
    module, value = rows()[operator]
    if isinstance(value, str):
        own.define(module, value, called, defaults(operator))
    else:
        own.name_expression(called, module, value, defaults(operator))


@functools.cache
def defaults(operator: str) -> dict[str, str]:
    """What attributes of an operator are unless they are given, as source; of rows that name their attributes."""
    asked = _keywords(rows()[operator])
    if "." in operator or not defs.has(operator):
        return {}
    found = {name: x.default_value for name, x in defs.get_schema(operator).attributes.items() if name in asked}
    known = {name: helper.get_attribute_value(value) for name, value in found.items() if value.type}
    return {name: attribute(name, x.decode() if isinstance(x, bytes) else x) for name, x in known.items()}


def is_optional(operator: str, name: str) -> bool:
    """Whether an attribute need not be given."""
    return _keywords(rows()[operator]).get(name) == "None"


def _keywords(row: Row) -> dict[str, str | None]:
    """Attributes that a row asks for, with its own defaults."""
    node: Any = row.value
    if isinstance(node, str):
        tree = parse_module(row.module)
        node = next(x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == row.value)
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        return {}
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return {argument.arg: None if default is None else ast.unparse(default) for argument, default in pairs}
