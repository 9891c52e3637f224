"""The library of native kernels as a whole: other instructions than this machine has, and what compilers watch for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from marks import needs
from native_kernels import needs_kernels
from paths import ROOT, TESTS

from onward.kernels.build import LIBRARY, build, compiler

FILES = sorted(map(str, (TESTS / "kernels").glob("test_kernels_*.py")))
pytestmark = needs_kernels


def run_tests(**environment: str) -> None:
    """The tests of all kernels, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", *FILES]
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_old_systems_can_load_it() -> None:
    """It asks for functions of the system that have been there since 2018, so that one wheel is for all."""
    content = LIBRARY.read_bytes()
    asked = {name: re.findall(rb"\b%s_([0-9.]+)\0" % name, content) for name in (b"GLIBC", b"GLIBCXX", b"CXXABI")}
    newest = {name: max(tuple(map(int, version.split(b"."))) for version in asked[name]) for name in asked}
    assert newest[b"GLIBC"] <= (2, 27) and newest[b"GLIBCXX"] <= (3, 4, 24) and newest[b"CXXABI"] <= (1, 3, 11), newest


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
