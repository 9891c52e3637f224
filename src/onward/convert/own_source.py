"""The source of classes and functions of ours, with all that it needs, for files that run without us."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

_REMARK = re.compile(r"  # (type: ignore|noqa)[^\n]*")
_REGISTRATION = re.compile(r"^@operators\.define\([^\n]*\)\n", re.MULTILINE)


def borrowed(
    objects: Iterable[Any], homes: tuple[str, ...], replaced: Mapping[str, str] | None = None
) -> tuple[list[str], list[str]]:
    """Sources in an order in which they can be read, and the imports that they need.

    What the modules in `homes` define is a part of the source; all else is imported. `replaced` has definitions to take
    in place of those in our files, by name.
    """
    collected = _Collected(homes, dict(replaced or {}))
    for one in objects:
        collected.add(one.__name__, sys.modules[one.__module__])
    return list(collected.sources.values()), sorted(collected.imports)


class _Collected:
    def __init__(self, homes: tuple[str, ...], replaced: dict[str, str]) -> None:
        self.sources: dict[str, str] = {}
        self.imports: set[str] = set()
        self._homes = homes
        self._replaced = replaced

    def add(self, name: str, module: Any) -> None:
        if name in self.sources:
            return
        text = _REGISTRATION.sub("", _REMARK.sub("", _definition(module, name)))
        imported = _imports(module)
        self.sources[name] = ""  # it may name itself
        for used in _names(text):
            if used in self._replaced:
                self.sources.setdefault(used, self._replaced[used])
            elif used in imported:
                self._add_imported(used, imported[used])
            elif used != name and used in _defined(module):
                self.add(used, module)
        del self.sources[name]
        self.sources[name] = text.rstrip()

    def _add_imported(self, name: str, statement: ast.Import | ast.ImportFrom) -> None:
        home = statement.module if isinstance(statement, ast.ImportFrom) else None
        if home is not None and home.startswith(self._homes):
            self.add(statement.names[0].name, sys.modules[home])
        else:
            self.imports.add(ast.unparse(statement))


def _names(text: str) -> list[str]:
    """All names that a piece of source uses, but for what is only said about types."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            node.annotation = ast.Constant(None)
    return list(dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))


def _defined(module: Any) -> dict[str, ast.stmt]:
    """What a file defines: functions, classes and constants."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


def _definition(module: Any, name: str) -> str:
    node, lines = _defined(module)[name], inspect.getsource(module).splitlines()
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(lines[first - 1 : node.end_lineno])


def _imports(module: Any) -> dict[str, ast.Import | ast.ImportFrom]:
    """Names that a file imports, and how."""
    found: dict[str, ast.Import | ast.ImportFrom] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: ast.Import([alias]) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: ast.ImportFrom(node.module, [alias], 0) for alias in node.names}
    return found
