"""Deferred import of sympy.

`onnx_ir` imports sympy for symbolic dimensions, which few programs compute, and sympy loads longer
than everything else together. During its import `onnx_ir` gets a stand-in, whose first use imports
sympy. See docs/decisions/0014-sympy-when-needed.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader  # which is slow to import

_USER, _DEFERRED = "onnx_ir._core", "sympy"


def defer_sympy() -> None:
    """Defer the import of sympy until its first use, unless it or `onnx_ir` was imported before."""
    if _USER not in sys.modules and _DEFERRED not in sys.modules:
        sys.meta_path.insert(0, _Watch())


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks up `__path__` and others
            raise AttributeError(name)
        if sys.modules.get(_DEFERRED) is self:  # during the import of `onnx_ir`, which calls the result later
            return _later(name)
        return getattr(importlib.import_module(_DEFERRED), name)


def _later(name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return getattr(importlib.import_module(_DEFERRED), name)(*args)

    return call


class _Watch:
    """Import hook that waits for one module and then removes itself."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _USER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Loader", _Loader(spec.loader))
        return spec


class _Loader:
    """Loader that runs the usual loader of a module with a stand-in for sympy."""

    def __init__(self, usual: Loader):
        self._usual = usual

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._usual.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._usual
        stand_in = _StandIn(_DEFERRED)
        loaded = sys.modules.setdefault(_DEFERRED, stand_in)
        try:
            self._usual.exec_module(module)
        finally:
            if loaded is stand_in:
                del sys.modules[_DEFERRED]
