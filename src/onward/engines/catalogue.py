"""Which engines there are here, on which devices, and how many operators each has."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping

from onnx import defs

from onward.engines import ENGINES, is_installed
from onward.engines.framework import Framework
from onward.engines.framework_engine import framework_class
from onward.engines.host import ONLY_ON_HOST
from onward.kernels import library
from onward.rules.registry import BODIES, RULES, Rewrite
from onward.standard import NEWEST_INTERPRETED
from onward.transform.inline import has_body

UNWRITTEN = "nobody has written it"

_PACKAGES = {"tensorflow": ("tensorflow", "tensorflow-cpu")}
"""Engine -> the packages that it may come in, if not one of its name."""


@dataclasses.dataclass(frozen=True)
class EngineInfo:
    name: str
    version: str | None
    """None if it is not installed."""
    devices: tuple[str, ...] | None = None
    """None where nobody has looked."""
    operators: int | None = None
    """How many of the standard's operators it has; None where nobody has looked, or the engine itself decides that."""
    cannot: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Operators that it does not have, and why."""

    kernels: str | None = None
    """The instructions that native kernels use, or why there are none. None for engines that know nothing of them."""

    @property
    def install(self) -> str:
        """How to get it."""
        return f"pip install 'onward[{self.name}]'"


_QUICK = ("onnxruntime", "numpy")
"""Engines that are imported at once."""


def engines(*, load: bool = True) -> list[EngineInfo]:
    """All engines, installed or not. To see devices and operators frameworks are imported, which takes a while."""
    return [_info(name, load or name in _QUICK) for name in ENGINES]


def devices(engine: str) -> list[str]:
    """What `device` may be for an engine, on this machine."""
    if engine == "onnxruntime":
        from onward.runtime.devices import devices as onnxruntime_devices

        return onnxruntime_devices()
    return framework_class(engine).devices()


def standard_operators() -> list[str]:
    """The operators of the standard at its newest version."""
    schemas = (schema for schema in defs.get_all_schemas() if schema.domain == "")
    return sorted(schema.name for schema in schemas if not schema.deprecated)


def lacking(framework: type[Framework]) -> dict[str, str]:
    """The standard operators that a framework neither has nor can express by others, with reasons."""
    return {
        name: framework.cannot.get(name, UNWRITTEN)
        for name in standard_operators()
        if name in framework.cannot or not _is_expressible(name, framework)
    }


def _is_expressible(name: str, framework: type[Framework]) -> bool:
    if name == "Constant" or name in ONLY_ON_HOST or name in framework.operators:
        return True
    return has_body(name, NEWEST_INTERPRETED) or ("", name) in BODIES or isinstance(RULES.get(("", name)), Rewrite)


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
