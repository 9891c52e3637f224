"""ONNX Runtime for the web, for tests: installed once, without native code."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest
from node_tests import cache_folder, locked

WEB = "onnxruntime-web@1.30.0"


def node_modules() -> Path:
    """A folder with the package in it; a test that needs it is skipped where it cannot be had."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm")
    return _install()


@functools.cache
def _install() -> Path:
    home = cache_folder() / WEB
    with locked(cache_folder() / f"{WEB}.lock"):
        if not (home / "node_modules").exists():
            command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(home), WEB]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                shutil.rmtree(home, ignore_errors=True)
                pytest.skip(f"could not install {WEB}: {done.stderr[-200:]}")
    return home / "node_modules"


def run_node(folder: Path, program: str, seconds: float = 300) -> str:
    """What a module prints that is run in a folder."""
    (folder / "program.mjs").write_text(program)
    done = subprocess.run(["node", "program.mjs"], cwd=folder, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout
