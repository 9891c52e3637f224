"""Compilation of the library: `python -m onward.kernels.build`.

Only the standard library is used, since the installation runs it. The kernels are compiled once per
instruction set, and the library selects the best that a machine has.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "native"
LIBRARY = HERE / "libonward_kernels.so"

FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
_AVX512 = ("-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mavx2", "-mfma", "-mprefer-vector-width=512")
INSTRUCTIONS: dict[str, tuple[str, ...]] = {"baseline": ()}
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTIONS |= {"avx2": ("-mavx2", "-mfma"), "avx512": _AVX512}


def compiler() -> str | None:
    """Return a C++ compiler: the one that `CXX` names, or a usual one."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++"))), None)


def is_up_to_date() -> bool:
    """True if the library exists and is newer than all its sources."""
    sources = [Path(__file__), *SOURCES.iterdir()]
    return LIBRARY.exists() and all(LIBRARY.stat().st_mtime >= source.stat().st_mtime for source in sources)


def build(to: Path = LIBRARY, more: tuple[str, ...] = ()) -> bool:
    """Compile the library; without a compiler or on another system, print why not."""
    cxx = compiler()
    if cxx is None or sys.platform != "linux":
        reason = "no C++ compiler" if cxx is None else f"{sys.platform} is not supported"
        print(f"onward: native kernels are left out ({reason}); ONNX Runtime's own are used", file=sys.stderr)
        return False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        jobs: list[tuple[str, str, tuple[str, ...]]] = [("library.cpp", "library.o", ())]
        jobs += [("kernels.cpp", f"{name}.o", (f"-DONWARD_ISA={name}", *flags)) for name, flags in INSTRUCTIONS.items()]
        # The linker takes standard-library functions from the first object that has them: the one for any machine.
        objects = [str(Path(folder) / library) for _, library, _ in jobs]

        def compile_one(source: str, library: str, flags: tuple[str, ...]) -> None:
            command = [cxx, *FLAGS, *flags, *more, "-c", str(SOURCES / source), "-o", str(Path(folder) / library)]
            subprocess.run(command, check=True)

        try:
            list(pool.map(lambda job: compile_one(*job), jobs))
            library = str(Path(folder) / "library.so")
            exports = f"-Wl,--version-script={SOURCES / 'exports.map'}"
            subprocess.run([cxx, "-shared", exports, *more, "-o", library, *objects], check=True)
        except subprocess.CalledProcessError:
            print("onward: native kernels are left out (they did not compile)", file=sys.stderr)
            return False
        shutil.copyfile(library, f"{to}.new")
        Path(f"{to}.new").replace(to)  # atomic: another process may have the old one open
    return True


if __name__ == "__main__":
    sys.exit(not build())
