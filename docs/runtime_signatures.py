"""What the reference of the Python interface cannot read from the source alone."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import griffe


class RuntimeSignatures(griffe.Extension):
    """Signatures that are made when a module is loaded, and functions that have the name of their module."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Complete functions that take a class of options, and such classes; let functions hide their modules."""
        for package in [pkg, *_packages(pkg)]:
            for function in package.functions.values():
                if not function.is_alias and any(str(d.value).startswith("with_options(") for d in function.decorators):
                    _complete(function)
            for options in package.classes.values():
                if not options.is_alias and any(str(d.value) == "documented" for d in options.decorators):
                    made = getattr(importlib.import_module(options.module.path), options.name)
                    options.docstring = griffe.Docstring(inspect.getdoc(made) or "", parent=options)
        hidden = {
            module.path: (package, module.members[name])
            for package in _packages(pkg)
            for name, module in package.modules.items()
            if package.imports.get(name) == f"{module.path}.{name}"
        }
        for package, function in hidden.values():
            package.members[function.name] = griffe.Alias(function.name, function, parent=package)
        for name, path in pkg.imports.items():
            if path in hidden:
                pkg.members[name] = griffe.Alias(name, hidden[path][1], parent=pkg)


def _packages(package: griffe.Module) -> Iterator[griffe.Module]:
    for module in package.modules.values():
        yield module
        yield from _packages(module)


def _complete(function: griffe.Function) -> None:
    made = getattr(importlib.import_module(function.module.path), function.name)
    function.docstring = griffe.Docstring(inspect.getdoc(made) or "", parent=function)
    function.parameters = griffe.Parameters(*map(_parameter, inspect.signature(made).parameters.values()))


def _parameter(given: inspect.Parameter) -> griffe.Parameter:
    default = None if given.default is given.empty else repr(given.default).replace("<factory>", "...")
    return griffe.Parameter(given.name, kind=griffe.ParameterKind(given.kind.description), default=default)
