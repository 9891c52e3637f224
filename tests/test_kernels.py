"""The library of native kernels as a whole: other instructions than this machine has, and what compilers watch for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import needs
from native_kernels import needs_kernels
from onward.kernels.build import build, compiler

HERE = Path(__file__).parent
TESTS = sorted(str(path) for path in HERE.glob("test_kernels_*.py"))
pytestmark = needs_kernels


def run_tests(**environment: str) -> None:
    """The tests of all kernels, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=HERE, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@needs("torch")
@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["baseline", "avx2"])
def test_other_instructions(instructions: str) -> None:
    run_tests(ONWARD_KERNELS_INSTRUCTIONS=instructions)


@needs("torch")
@pytest.mark.slow
def test_sanitizers(tmp_path: Path) -> None:
    """No memory is touched that is not a tensor's, and nothing is done that C++ leaves open."""
    watched = tmp_path / "libwatched.so"
    flags = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    cxx = compiler()
    if cxx is None or not build(watched, flags):
        pytest.skip("this compiler has no sanitizers")
    found = [
        subprocess.run([cxx, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    run_tests(
        ONWARD_KERNELS=str(watched), LD_PRELOAD=" ".join(found), ASAN_OPTIONS="detect_leaks=0:verify_asan_link_order=0"
    )
