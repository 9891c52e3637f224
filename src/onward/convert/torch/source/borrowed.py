"""The source of classes and functions of ours, with all that it needs, for files that run without us."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from onward.convert.torch import exact

_REMARK = re.compile(r"  # (type: ignore|noqa)[^\n]*")


def borrowed(objects: Iterable[Any], replaced: Mapping[str, str] | None = None) -> tuple[list[str], list[str]]:
    """Sources in an order in which they can be read, and the imports that they need.

    `replaced` has definitions to take in place of those in our files, by name.
    """
    collected = _Collected(dict(replaced or {}))
    for one in objects:
        collected.add(one)
    return list(collected.sources.values()), sorted(collected.imports)


class _Collected:
    def __init__(self, replaced: dict[str, str]) -> None:
        self.sources: dict[str, str] = {}
        self.imports: set[str] = set()
        self._replaced = replaced

    def add(self, one: Any) -> None:
        name = one.__name__
        if name in self.sources:
            return
        text = _REMARK.sub("", inspect.getsource(one))
        module = sys.modules[one.__module__]
        imported = _imports(module)
        self.sources[name] = ""  # it may name itself
        for used in _names(text):
            found = getattr(module, used, None)
            if used in self._replaced:
                self.sources.setdefault(used, self._replaced[used])
            elif used in imported and not imported[used].startswith(f"from {exact.__name__}"):
                self.imports.add(imported[used])
            elif getattr(found, "__module__", "").startswith(exact.__name__):
                self.add(found)
        del self.sources[name]
        self.sources[name] = text.rstrip()


def _names(text: str) -> list[str]:
    """All names that a piece of source uses."""
    return list(dict.fromkeys(node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)))


def _imports(module: Any) -> dict[str, str]:
    """Names that a file imports, and how."""
    found = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                single = (
                    ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [alias], 0)
                )
                found[alias.asname or alias.name] = ast.unparse(single)
    return found
