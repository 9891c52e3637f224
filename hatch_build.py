"""Compile the native kernels when the package is installed or a wheel is built, if a compiler is available."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = Path(__file__).parent / "src" / "onward" / "kernels" / "build.py"


class KernelsBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile kernels, and tag the wheel for this platform and all Pythons: kernels do not use Python's ABI."""
        spec = importlib.util.spec_from_file_location("build_kernels", BUILD)
        assert spec is not None and spec.loader is not None
        kernels = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernels)
        if not kernels.is_up_to_date() and not kernels.build():
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append("src/onward/kernels/*.so")
