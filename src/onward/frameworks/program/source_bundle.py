"""Bundles of Onward's own definitions as text for standalone files."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import re
import symtable
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from onward.errors import UnsupportedError

_OURS = "onward."
_REMARK = re.compile(r"  # (type: ignore|noqa)[^\n]*")


class SourceBundle:
    """Definitions of Onward under unique names, each after those that it needs, and imports of others."""

    def __init__(
        self,
        *,
        instead: Mapping[str, str] | None = None,
        replaced: Mapping[str, str] | None = None,
        taken: Iterable[str] = (),
        annotated: bool = True,
    ):
        """Take replacements of definitions, names in use, and what to do with annotations.

        `instead` maps a module to another one, or `module.name` to `module:name`. `replaced` has texts
        of definitions by name. Names in `taken` are not used. Without `annotated`, annotations of
        arguments are dropped.
        """
        self._instead = instead or {}
        self._replaced = replaced or {}
        self._annotated = annotated
        self._names: dict[tuple[str, str], str] = {}
        self._imports: dict[str, None] = {}
        self._texts: dict[str, str] = {}
        self._taken = set(taken)

    def texts(self) -> list[str]:
        return list(self._texts.values())

    def imports(self) -> list[str]:
        """Return the import lines of the definitions."""
        return list(self._imports)

    # ---- definitions -------------------------------------------------------------------------------------------------

    def add(self, *objects: Any) -> None:
        """Add functions and classes under their own names."""
        for definition in objects:
            self.define(definition.__module__, definition.__name__)

    def define(
        self, module: str, name: str, called: str | None = None, defaults: Mapping[str, str] | None = None
    ) -> str:
        """Add a definition of a module, with `defaults` for required keywords; return its name."""
        module, _, other = self._instead.get(f"{module}.{name}", self._instead.get(module, module)).partition(":")
        name = other or name
        if (unique := self._names.get((module, name))) is not None:
            if called is None or called == unique:
                return unique
            self._texts[called] = f"{called} = {unique}"
            return called
        source = _module(module)
        statement = source.definitions.get(name)
        if statement is None:
            raise UnsupportedError(f"`{module}` has no definition of `{name}` that can be written to a file")
        if isinstance(statement, ast.Import | ast.ImportFrom):
            return self._import(statement, name)
        unique = called or (name if name not in self._taken else f"{name}_{module.rpartition('.')[2]}")
        self._taken.add(unique)
        self._names[module, name] = unique
        self._texts[unique] = self._copy(source, statement, {name: unique} if name != unique else {}, defaults)
        for other in source.completing(name):
            self.define(module, other)
        return unique

    def name_expression(
        self, called: str, module: str, expression: ast.expr, defaults: Mapping[str, str] | None = None
    ) -> None:
        """Add a name for an expression of a module."""
        text = self._copy(_module(module), expression, {}, defaults)
        self._taken.add(called)
        self._texts[called] = _as_function(called, text) if isinstance(expression, ast.Lambda) else f"{called} = {text}"

    def _copy(
        self,
        source: _Module,
        node: ast.stmt | ast.expr,
        renamed: Mapping[str, str],
        defaults: Mapping[str, str] | None,
    ) -> str:
        """Return the text of a node of a module, with the names of this bundle."""
        inner = (statement for statement in ast.walk(node) if isinstance(statement, ast.ImportFrom))
        if any(str(statement.module).startswith(_OURS) for statement in inner):
            raise UnsupportedError(
                f"`{getattr(node, 'name', node)}` of the engine needs modules of Onward that a file cannot contain",
                hint="use live functions: `onward.to_jax`",
            )
        names = dict(renamed)
        for name in source.mentioned(node):
            if name in self._replaced:
                self._texts.setdefault(name, self._replaced[name])
            elif name not in names:
                names[name] = self.define(source.name, name)
        changed = {old: new for old, new in names.items() if old != new}
        return source.text(node, _Changes(changed, defaults or {}, self._annotated))

    def _import(self, statement: ast.Import | ast.ImportFrom, name: str) -> str:
        alias = next(alias for alias in statement.names if (alias.asname or alias.name.partition(".")[0]) == name)
        if isinstance(statement, ast.ImportFrom):
            if str(statement.module).startswith(_OURS):
                return self.define(str(statement.module), alias.name)
            line = ast.unparse(ast.ImportFrom(statement.module, [alias], statement.level))
        else:
            line = ast.unparse(ast.Import([alias]))
        self._imports[line] = None
        self._taken.add(name)
        return name


def parse_module(name: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return _module(name).tree


@functools.cache
def _module(name: str) -> _Module:
    return _Module(name)


class _Module:
    """Module as text."""

    def __init__(self, name: str):
        self.name = name
        self._text = inspect.getsource(importlib.import_module(name))
        self._lines = self._text.splitlines()
        self.tree = ast.parse(self._text)
        self.definitions = {name: statement for statement in self.tree.body for name in _defined_names(statement)}

    def completing(self, name: str) -> Iterator[str]:
        """Yield functions that a decorator attaches to this one: `@softmax.defjvp`."""
        for statement in self.tree.body:
            if isinstance(statement, ast.FunctionDef):
                owners = (d.value for d in statement.decorator_list if isinstance(d, ast.Attribute))
                if any(isinstance(owner, ast.Name) and owner.id == name for owner in owners):
                    yield statement.name

    def mentioned(self, node: ast.AST) -> list[str]:
        """Return the names of the module that a node reads."""
        return [name for name in _globals(self._plain(node)) if name in self.definitions]

    def text(self, node: ast.AST, changes: _Changes) -> str:
        """Return the text of a node with other names, without table decorators."""
        text = self._plain(node)
        lines = [line.encode() for line in text.splitlines()]
        for edit in sorted(_edits(ast.parse(text), changes), reverse=True):
            old = lines[edit.line - 1]
            lines[edit.line - 1] = old[: edit.start] + edit.text.encode() + old[edit.end :]
        return b"\n".join(lines).decode()

    def _plain(self, node: ast.AST) -> str:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            text = ast.get_source_segment(self._text, node) or ""
            return f"({text})" if isinstance(node, ast.expr) and "\n" in text else text
        decorators = [ast.get_source_segment(self._text, decorator) or "" for decorator in node.decorator_list]
        above = [f"@{text}" for text in decorators if "operators.define" not in text]
        return _REMARK.sub("", "\n".join([*above, *self._lines[node.lineno - 1 : node.end_lineno]]))


@functools.cache
def _globals(text: str) -> list[str]:
    """Return the names that a text reads and does not define in functions, in order of mention."""
    tree = _Unannotated().visit(ast.parse(text))
    read: set[str] = set()
    pending = [symtable.symtable(ast.unparse(tree), "program", "exec")]
    while pending:
        table = pending.pop()
        read.update(
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module")
        )
        pending += table.get_children()
    mentioned = dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    return [name for name in mentioned if name in read and not hasattr(builtins, name)]


class _Changes(NamedTuple):
    renamed: Mapping[str, str]
    defaults: Mapping[str, str]
    annotated: bool


class _Edit(NamedTuple):
    line: int
    start: int
    end: int
    text: str = ""


def _edits(tree: ast.Module, changes: _Changes) -> Iterator[_Edit]:
    renamed, defaults, annotated = changes
    whole = getattr(tree.body[0], "value", tree.body[0])
    if isinstance(whole, ast.FunctionDef | ast.Lambda):
        for argument, default in zip(whole.args.kwonlyargs, whole.args.kw_defaults, strict=True):
            if default is None and argument.arg in defaults:
                end = argument.col_offset + len(argument.arg)
                yield _Edit(argument.lineno, end, end, f"={defaults[argument.arg]}")
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) if name in renamed:
                yield _Edit(node.lineno, node.col_offset, node.col_offset + len(name), renamed[name])
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if name in renamed:
                start = node.col_offset + len("def " if isinstance(node, ast.FunctionDef) else "class ")
                yield _Edit(node.lineno, start, start + len(name), renamed[name])
        match node:
            case ast.arg(arg=name, annotation=ast.expr() as annotation) if not annotated:
                yield _Edit(node.lineno, node.col_offset + len(name), annotation.end_col_offset or 0)
            case ast.FunctionDef(returns=ast.expr() as returns) if not annotated:
                yield _Edit(returns.lineno, returns.col_offset - len(" -> "), returns.end_col_offset or 0)


class _Unannotated(ast.NodeTransformer):
    """Remover of annotations, which nothing evaluates."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)


def _defined_names(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [alias.asname or alias.name.partition(".")[0] for alias in names]
    return []


def _as_function(called: str, text: str) -> str:
    expression = ast.parse(text, mode="eval").body
    assert isinstance(expression, ast.Lambda)
    return f"def {called}({ast.unparse(expression.args)}):\n    return {ast.unparse(expression.body)}"
