"""Extension of griffe for the API reference: signatures and docstrings that exist only at run time."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import griffe


class RuntimeSignatures(griffe.Extension):
    """Extension that reads signatures from loaded modules, and resolves functions with the name of their module."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Complete functions with options and classes of options; replace modules by functions of the same name."""
        for package in [pkg, *_packages(pkg)]:
            for function in package.functions.values():
                if not function.is_alias and any(str(d.value).startswith("with_options(") for d in function.decorators):
                    _complete(function)
            for options in package.classes.values():
                if not options.is_alias and any(str(d.value) == "documented" for d in options.decorators):
                    loaded = getattr(importlib.import_module(options.module.path), options.name)
                    options.docstring = griffe.Docstring(inspect.getdoc(loaded) or "", parent=options)
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
    loaded = getattr(importlib.import_module(function.module.path), function.name)
    function.docstring = griffe.Docstring(inspect.getdoc(loaded) or "", parent=function)
    function.parameters = griffe.Parameters(*map(_parameter, inspect.signature(loaded).parameters.values()))


def _parameter(parameter: inspect.Parameter) -> griffe.Parameter:
    default = None if parameter.default is parameter.empty else repr(parameter.default).replace("<factory>", "...")
    return griffe.Parameter(parameter.name, kind=griffe.ParameterKind(parameter.kind.description), default=default)
