"""ONNX Runtime for browsers: the package `onnxruntime-web` of npm, from which a page takes four files."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onward.errors import UnsupportedError, WriteError
from onward.model.storage import write_file

VERSION = "1.30.0"
"""What the page was tested with."""
_PACKAGE = f"onnxruntime-web@{VERSION}"
_PARTS = {
    "processor": ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"),
    "graphics": ("ort.bundle.min.mjs", "ort-wasm-simd-threaded.jsep.wasm"),
}
"""What computes -> the module that the page imports, and the program that it runs.

There is a newer program for graphics cards, but it leaves out float64, in which optimizers compute their rates.
"""
_FILES = [file for files in _PARTS.values() for file in files]
_PATIENCE = 600


def find_runtime(given: str | os.PathLike[str] | None) -> Path:
    """The folder that has the files: of an installed package, or what npm has got."""
    return _installed(Path(given)) if given is not None else _cached()


def add_runtime(folder: Path, source: Path) -> dict[str, Any]:
    """Write the runtime into the folder of a page. Programs are packed, so that there is less to load on any server."""
    folder.mkdir(exist_ok=True)
    told: dict[str, Any] = {}
    for what, (module, program) in _PARTS.items():
        shutil.copyfile(source / module, folder / module)
        packed = source / f"{program}.gz"
        content = packed.read_bytes() if packed.exists() else _pack(source / program)
        write_file(folder / f"{program}.gz", content)
        told[what] = {"module": module, "program": f"{program}.gz"}
    return told


def _pack(file: Path) -> bytes:
    return gzip.compress(file.read_bytes(), mtime=0)


def _installed(folder: Path) -> Path:
    """Where the files are in an installed package; `folder` may be the package, or its `dist`."""
    for place in (folder / "dist", folder):
        if all((place / file).is_file() for file in _FILES):
            return place
    raise UnsupportedError(
        f"`{folder}` is not the package onnxruntime-web: there is no {_FILES[0]} in it",
        hint=f"`npm install {_PACKAGE}` makes it, as node_modules/onnxruntime-web",
    )


def _cached() -> Path:
    """The files as npm gets them, once for all pages."""
    place = _cache() / f"onnxruntime-web-{VERSION}"
    wanted = [file if file.endswith("mjs") else f"{file}.gz" for file in _FILES]
    if not all((place / file).is_file() for file in wanted):
        place.mkdir(parents=True, exist_ok=True)
        for name, content in _from_npm():
            write_file(place / name, content)
    return place


def _cache() -> Path:
    base = os.environ.get("ONWARD_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = Path(base) / "onward"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(
            f"`{place}` cannot be made, to keep onnxruntime-web in: {error.strerror}",
            hint="name another folder in the variable ONWARD_CACHE",
        ) from error
    return place


def _from_npm() -> Iterator[tuple[str, bytes]]:
    npm = shutil.which("npm")
    if npm is None:
        raise UnsupportedError(
            f"a page needs {_PACKAGE}, which npm gets, and there is no npm",
            hint="install Node.js, or name a folder that has the package: `--runtime node_modules/onnxruntime-web`",
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", "--ignore-scripts", "--pack-destination", folder, _PACKAGE]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE)
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode or not archives:
            problem = (done.stderr.strip() or "it says nothing more").splitlines()[-1]
            raise UnsupportedError(
                f"npm could not get {_PACKAGE}: {problem}",
                hint="is there a network? or name a folder that has the package: `--runtime FOLDER`",
            )
        with tarfile.open(archives[0]) as archive:
            for file in _FILES:
                member = archive.extractfile(f"package/dist/{file}")
                assert member is not None
                content = member.read()
                yield (file, content) if file.endswith("mjs") else (f"{file}.gz", gzip.compress(content, mtime=0))
