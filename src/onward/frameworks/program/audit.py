"""Last check of a program before it is written: it is Python and does only what Onward intends.

Content of a model has become literals and names by then (see source_text.py). This check does not
rely on it.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Collection, Iterator

from onward.errors import UnsupportedError
from onward.frameworks.program.source_text import BUILTINS

_ALLOWED = (
    "__future__", "collections", "contextlib", "contextvars", "functools", "itertools", "json", "math", "numpy",
    "operator", "pathlib", "secrets", "struct", "typing",
)  # fmt: skip
"""Modules that every program may import."""
_SPECIAL = {"__init__", "__call__", "__class__", "__name__", "__file__", "__getstate__", "__setstate__"}
_OUTSIDE = {"load", "save", "open", "read", "write", "read_bytes", "write_bytes"}
"""Attributes that access files, allowed only in functions of the same names."""
_NEVER = {
    "compile", "ctypes", "ctypeslib", "eval", "exec", "fromfile", "get_file", "hub", "load_library", "load_model",
    "loadtxt", "memmap", "popen", "savez", "system", "tofile", "unlink",
}  # fmt: skip
"""Attributes that no program needs."""


def audit_program(source: str, frameworks: Collection[str]) -> str:
    """Return the program if it imports these frameworks only and defines all names that it uses."""
    try:
        tree, table = ast.parse(source), symtable.symtable(source, "program", "exec")
    except (SyntaxError, ValueError) as error:
        raise program_error(f"cannot be written: it is not Python: {error}") from error
    for objection in _objections(tree, table, frameworks):
        raise program_error(f"cannot be written: {objection}")
    return source


def program_error(problem: str) -> UnsupportedError:
    return UnsupportedError(
        f"the program of the model {problem}",
        hint="report the model; run it live: `onward.to_torch`, `onward.to_keras` or `onward.to_jax`",
    )


def _objections(tree: ast.Module, table: symtable.SymbolTable, frameworks: Collection[str]) -> Iterator[str]:
    yield from _imports(tree, {*_ALLOWED, *frameworks})
    yield from _statements(tree)
    yield from _attributes(tree, "")
    outer = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    outer |= {child.get_name() for child in table.get_children()}
    yield from _names(table, outer, {symbol.get_name() for symbol in table.get_symbols() if symbol.is_imported()})


def _imports(tree: ast.Module, allowed: Collection[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        yield from (f"it imports `{name}`" for name in names if name.partition(".")[0] not in allowed)


def _statements(tree: ast.Module) -> Iterator[str]:
    """Yield top-level statements with an effect, and names that are defined twice."""
    defined: set[str] = set()
    for i, node in enumerate(tree.body):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                if name in defined:
                    yield f"`{name}` is defined twice"
                defined.add(name)
            case ast.Import() | ast.ImportFrom() | ast.Assign() | ast.AnnAssign():
                pass
            case ast.Expr(ast.Constant()) if not i:  # docstring
                pass
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(), "defjvp" | "defvjp"))):  # `softmax.defjvp(...)`
                pass
            case _:
                yield f"line {node.lineno} runs code on import"


def _attributes(node: ast.AST, function: str) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        function = node.name
    if isinstance(node, ast.Attribute):
        name = node.attr
        private = name.startswith("__") and name not in _SPECIAL
        outside = name in _NEVER or (name in _OUTSIDE and function not in _OUTSIDE)
        if private or (outside and not _of_self(node)):
            yield f"line {node.lineno} uses `{name}`"
    for child in ast.iter_child_nodes(node):
        yield from _attributes(child, function)


def _of_self(node: ast.Attribute) -> bool:
    """True if an attribute belongs to a model, whose weights may have any name."""
    value = node.value
    while isinstance(value, ast.Attribute | ast.Subscript):
        value = value.value
    return isinstance(value, ast.Name) and value.id == "self"


def _names(table: symtable.SymbolTable, outer: Collection[str], imported: Collection[str]) -> Iterator[str]:
    """Yield outer names that nothing defines, and names of functions that hide an import."""
    for symbol in table.get_symbols():
        name = symbol.get_name()
        if symbol.is_referenced() and symbol.is_global() and name not in outer and name not in BUILTINS:
            yield f"`{name}` is not defined"
        if table.get_type() == "function" and symbol.is_local() and name in imported:
            yield f"`{name}` hides an import"
    for child in table.get_children():
        yield from _names(child, outer, imported)
