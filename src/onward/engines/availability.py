"""Available engines on this machine, with their devices and operators."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping

from onnx import defs

from onward.engines import ENGINES, is_installed
from onward.engines.framework import ONLY_ON_HOST, Framework, framework_class
from onward.kernels import library
from onward.rules.registry import BODIES, RULES, Rewrite
from onward.standard import NEWEST_INTERPRETED
from onward.transform.inline import has_body

UNWRITTEN = "not implemented"

_PACKAGES = {"tensorflow": ("tensorflow", "tensorflow-cpu")}
"""Engine -> its possible packages, if the names differ."""


@dataclasses.dataclass(frozen=True)
class EngineInfo:
    name: str
    version: str | None
    """None if the engine is not installed."""
    devices: tuple[str, ...] | None = None
    """None if the framework was not imported."""
    operators: int | None = None
    """Number of supported standard operators. None if the framework was not imported, or for ONNX Runtime."""
    cannot: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Missing operator -> reason."""

    kernels: str | None = None
    """CPU instructions of the native kernels, or the reason why there are none. For ONNX Runtime only."""

    @property
    def install(self) -> str:
        """Command that installs the engine."""
        return f"pip install 'onward[{self.name}]'"


def engines(*, load: bool = True) -> list[EngineInfo]:
    """Return all engines, installed or not. `load` imports frameworks, slowly, to list devices and operators."""
    return [_info(name, load or name in ("onnxruntime", "numpy")) for name in ENGINES]


def devices(engine: str) -> list[str]:
    """Return the valid values of `device` for an engine on this machine."""
    if engine == "onnxruntime":
        from onward.runtime.devices import devices as onnxruntime_devices

        return onnxruntime_devices()
    return framework_class(engine).devices()


def standard_operators() -> list[str]:
    """Return the operators of the newest standard."""
    schemas = (schema for schema in defs.get_all_schemas() if schema.domain == "")
    return sorted(schema.name for schema in schemas if not schema.deprecated)


def lacking(framework: type[Framework]) -> dict[str, str]:
    """Return standard operators that a framework cannot run, even in terms of others -> the reason."""
    rows = {"Constant", *ONLY_ON_HOST, *framework.operators}

    def is_expressible(name: str) -> bool:
        has_rewrite = ("", name) in BODIES or isinstance(RULES.get(("", name)), Rewrite)
        return name in rows or has_rewrite or has_body(name, NEWEST_INTERPRETED)

    missing = (name for name in standard_operators() if name in framework.cannot or not is_expressible(name))
    return {name: framework.cannot.get(name, UNWRITTEN) for name in missing}


def _info(name: str, load: bool) -> EngineInfo:
    if not is_installed(name):
        return EngineInfo(name, None)
    version = next(v for package in _PACKAGES.get(name, (name,)) if (v := _version(package)))
    if not load:
        return EngineInfo(name, version)
    if name == "onnxruntime":
        return EngineInfo(name, version, tuple(devices(name)), kernels=library().note)
    missing = lacking(framework_class(name))
    return EngineInfo(name, version, tuple(devices(name)), len(standard_operators()) - len(missing), missing)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
