"""Compiles the native kernels when the package is installed or a wheel is made, if there is a compiler."""

from __future__ import annotations

import importlib.util
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = Path(__file__).parent / "src" / "onward" / "kernels" / "build.py"


class KernelsBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """A wheel with kernels is for one platform, and for all versions of Python: the library does not know it."""
        spec = importlib.util.spec_from_file_location("build_kernels", BUILD)
        assert spec is not None and spec.loader is not None
        kernels = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernels)
        if kernels.TARGET:
            self._include_for_another(kernels, build_data)
        elif kernels.is_up_to_date() or kernels.build():
            self._tag(build_data, sysconfig.get_platform())
            build_data["artifacts"].append("src/onward/kernels/*.so")

    def _include_for_another(self, kernels: Any, build_data: dict[str, Any]) -> None:
        """Compile for another platform, beside the library of this one."""
        self._folder = tempfile.TemporaryDirectory()  # until the wheel is written
        library = Path(self._folder.name) / kernels.LIBRARY.name
        if not kernels.build(library):
            raise RuntimeError(f"there are no kernels for {kernels.TARGET}")
        self._tag(build_data, kernels.TARGET)
        build_data["force_include"][str(library)] = f"onward/kernels/{library.name}"

    @staticmethod
    def _tag(build_data: dict[str, Any], platform: str) -> None:
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform.replace('-', '_').replace('.', '_')}"
