"""A last look at a program before it is written: it is Python, and does nothing that Onward would not have it do.

What comes from a model has become literals and names by then (see python.py); that is not taken on trust.
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
"""What every program may import."""
_SPECIAL = {"__init__", "__call__", "__class__", "__name__", "__file__", "__getstate__", "__setstate__"}
_OUTSIDE = {"load", "save", "open", "read", "write", "read_bytes", "write_bytes"}
"""What reaches files: only in functions that are called so."""
_NEVER = {
    "compile", "ctypes", "ctypeslib", "eval", "exec", "fromfile", "get_file", "hub", "load_library", "load_model",
    "loadtxt", "memmap", "popen", "savez", "system", "tofile", "unlink",
}  # fmt: skip
"""Attributes that no program has a use for."""
_STATEMENTS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


def audit_program(source: str, frameworks: Collection[str]) -> str:
    """The program itself, if it imports these frameworks only, and knows all names that it uses."""
    try:
        tree, table = ast.parse(source), symtable.symtable(source, "program", "exec")
    except (SyntaxError, ValueError) as error:
        raise _refusal(f"it is no Python: {error}") from error
    for objection in _objections(tree, table, frameworks):
        raise _refusal(objection)
    return source


def _refusal(objection: str) -> UnsupportedError:
    return UnsupportedError(
        f"the program that was made of the model cannot be written: {objection}",
        hint="please report the model; its live form needs no program: `onward.to_torch`, `to_keras`, `to_jax`",
    )


def _objections(tree: ast.Module, table: symtable.SymbolTable, frameworks: Collection[str]) -> Iterator[str]:
    yield from _imports(tree, {*_ALLOWED, *frameworks})
    yield from _statements(tree)
    yield from _defined_once(tree)
    yield from _attributes(tree, "")
    outer = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    outer |= {child.get_name() for child in table.get_children()}
    yield from _names(table, outer)
    yield from _hidden_names(table, {symbol.get_name() for symbol in table.get_symbols() if symbol.is_imported()})


def _imports(tree: ast.Module, allowed: Collection[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        yield from (f"it imports `{name}`" for name in names if name.partition(".")[0] not in allowed)


def _statements(tree: ast.Module) -> Iterator[str]:
    """What happens when the program is imported."""
    for i, node in enumerate(tree.body):
        is_docstring = not i and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not isinstance(node, _STATEMENTS) and not is_docstring and not _completes(node):
            yield f"line {node.lineno} does something when it is imported"


def _completes(node: ast.stmt) -> bool:
    """Whether a statement gives a function its derivative: `softmax.defjvp(...)`."""
    match node:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(), "defjvp" | "defvjp"))):
            return True
    return False


def _attributes(node: ast.AST, function: str) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        function = node.name
    if isinstance(node, ast.Attribute):
        name = node.attr
        private = name.startswith("__") and name not in _SPECIAL
        outside = name in _NEVER or (name in _OUTSIDE and function not in _OUTSIDE)
        if private or (outside and not _of_self(node)):
            yield f"line {node.lineno} reaches for `{name}`"
    for child in ast.iter_child_nodes(node):
        yield from _attributes(child, function)


def _of_self(node: ast.Attribute) -> bool:
    """Whether it is a part of a model: weights may have any name."""
    value = node.value
    while isinstance(value, ast.Attribute | ast.Subscript):
        value = value.value
    return isinstance(value, ast.Name) and value.id == "self"


def _names(table: symtable.SymbolTable, outer: Collection[str]) -> Iterator[str]:
    """What functions read from outside of themselves is there."""
    for symbol in table.get_symbols():
        name = symbol.get_name()
        if symbol.is_referenced() and symbol.is_global() and name not in outer and name not in BUILTINS:
            yield f"nothing says what `{name}` is"
    for child in table.get_children():
        yield from _names(child, outer)


def _hidden_names(table: symtable.SymbolTable, imported: Collection[str]) -> Iterator[str]:
    for child in table.get_children():
        names = [symbol.get_name() for symbol in child.get_symbols() if symbol.is_local()]
        if child.get_type() == "function":
            yield from (f"`{name}` is two things" for name in names if name in imported)
        yield from _hidden_names(child, imported)


def _defined_once(tree: ast.Module) -> Iterator[str]:
    seen: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if node.name in seen:
                yield f"`{node.name}` is defined twice"
            seen.add(node.name)
