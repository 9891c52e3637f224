"""`onward.page`: write the folder of a page."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from onward.errors import ArgumentError, UnsupportedError, WriteError
from onward.model import Source, load
from onward.model.storage import write_file
from onward.options import PageOptions, with_options
from onward.training.config import Config
from onward.training.data import in_parts
from onward.training.preparation import prepare_training, with_head_of
from onward.transform.training import strip
from onward.web.content import Content

_DESCRIPTION = "page.json"


@dataclasses.dataclass(frozen=True)
class _Arguments(PageOptions):
    model: Source = None  # type: ignore[assignment]  # checked below, with a hint
    _: dataclasses.KW_ONLY
    output: str | os.PathLike[str] = "site"
    force: bool = False


@dataclasses.dataclass(frozen=True)
class Page:
    """A page on disk."""

    path: Path
    notes: tuple[str, ...]
    """Notes about the model and the data, for the author."""
    sizes: dict[str, int]
    """Bytes that a browser loads: `page`, `model`, `data` and `runtime`, or `graphics` instead of the latter."""

    @property
    def loaded(self) -> int:
        """Return the number of bytes that a browser loads before it can train."""
        return sum(size for name, size in self.sizes.items() if name != "graphics")


@with_options(_Arguments)
def page(output: str | os.PathLike[str] = "site", force: bool = False, **arguments: Any) -> Page:
    """Write a page that trains a model in the browser: a folder for any static web server.

        onward.page("digits.onnx", "digits.npz", loss="cross_entropy", validation=0.1, output="site")

    Visitors train the model, watch, pause and resume, try it, and download it. Batches come in the
    order of `onward.train`, with the same losses. The page requests nothing from other servers.

    - `model`: a training model, or any model with a recipe: `loss=...`, `optimizer=...` as in
      `onward.prepare`
    - `output`: the folder
    - `force`: write into a folder that holds other files
    """
    if arguments.get("model") is None:
        raise ArgumentError("`page` needs `model`", hint="see `help(onward.page)`")
    folder = Path(output)
    _refuse_to_fill(folder, force)
    title, picture, runtime = (arguments.pop(name, None) for name in ("title", "picture", "runtime"))
    source = _installed(Path(runtime)) if runtime is not None else _cached()
    content, name = _content(arguments, picture)
    folder.mkdir(parents=True, exist_ok=True)
    programs = add_runtime(folder / "runtime", source)
    page_files = list(files("onward.web").joinpath("static").iterdir())
    for file in page_files:
        write_file(folder / file.name, file.read_bytes())
    for file_name, data in content.files.items():
        write_file(folder / file_name, data)
    described = {"title": title or name, **content.description, "runtime": {"version": VERSION, **programs}}
    write_file(folder / _DESCRIPTION, json.dumps(described, indent=1) + "\n")
    sizes = {
        "page": sum((folder / file).stat().st_size for file in [_DESCRIPTION, *(file.name for file in page_files)]),
        "model": sum(len(content.files[file]) for file in ("step.onnx", "evaluation.onnx", "training.onnx")),
        "data": len(content.files["data.bin"]),
    }
    for size, device in (("runtime", "processor"), ("graphics", "graphics")):
        sizes[size] = sum((folder / "runtime" / file).stat().st_size for file in programs[device].values())
    return Page(folder, tuple(content.notes), sizes)


def _content(arguments: dict[str, Any], picture: str | None) -> tuple[Content, str]:
    """Return the content of the page, and the name of the model."""
    data, validation, notes = in_parts(arguments.get("data"), arguments.get("validation"))
    settings = {**arguments, "data": data if data is not None else "", "validation": validation}
    config = dataclasses.replace(Config.from_arguments("page", settings), data=data)
    original, seed = load(config.model), config.seed or 0
    prepared = prepare_training(original, data, config.columns, arguments.get("batch_size"), config.recipe, seed)
    config = dataclasses.replace(config, batch_size=prepared.batch_size, seed=seed)
    plain = strip(original) if original.is_training_model else original
    trained = with_head_of(config.recipe, plain, seed)
    with config.start_engine(prepared.model) as engine:
        content = Content(trained, prepared.model, engine, config, prepared.data, picture)
    content.notes[:0] = [*notes, *prepared.notes]
    return content, original.path.stem if original.path else original.graph.name or "model"


def _refuse_to_fill(folder: Path, force: bool) -> None:
    """Refuse a folder that holds other files than a page."""
    if folder.exists() and not folder.is_dir():
        raise WriteError(f"`{folder}` is a file; a page is a folder", hint="write another folder: `-o FOLDER`")
    if not force and folder.exists() and not (folder / _DESCRIPTION).exists() and any(folder.iterdir()):
        raise WriteError(f"`{folder}` holds other files", hint="write another folder: `-o FOLDER`, or use `--force`")


# ---- runtime ---------------------------------------------------------------------------------------------------------


VERSION = "1.30.0"  # the page is tested with this one
_PACKAGE = f"onnxruntime-web@{VERSION}"
_PARTS = {
    "processor": ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"),
    "graphics": ("ort.bundle.min.mjs", "ort-wasm-simd-threaded.jsep.wasm"),
}
"""Device -> the module that the page imports, and the program that the module runs.

onnxruntime-web has a newer program for graphics cards, but without float64, in which optimizers
compute learning rates.
"""
_FILES = [file for files in _PARTS.values() for file in files]
_PATIENCE = 600  # seconds for npm to download the package


def add_runtime(folder: Path, source: Path) -> dict[str, dict[str, str]]:
    """Write the runtime into the folder of a page. Programs are compressed here, for servers that do not."""
    folder.mkdir(exist_ok=True)
    for module, program in _PARTS.values():
        shutil.copyfile(source / module, folder / module)
        packed = source / f"{program}.gz"
        write_file(
            folder / packed.name, packed.read_bytes() if packed.exists() else _gzip((source / program).read_bytes())
        )
    return {device: {"module": module, "program": f"{program}.gz"} for device, (module, program) in _PARTS.items()}


def _gzip(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)  # the same bytes every time


def _installed(package: Path) -> Path:
    """Return the folder of the files in an installed package, or in its `dist`."""
    for folder in (package / "dist", package):
        if all((folder / file).is_file() for file in _FILES):
            return folder
    raise UnsupportedError(
        f"`{package}` is not the package onnxruntime-web: {_FILES[0]} is missing",
        hint=f"install it: `npm install {_PACKAGE}`, then `--runtime node_modules/onnxruntime-web`",
    )


def _cached() -> Path:
    """Return the folder of the files, downloaded once for all pages."""
    base = os.environ.get("ONWARD_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "onward" / f"onnxruntime-web-{VERSION}"
    cached = [file if file.endswith("mjs") else f"{file}.gz" for file in _FILES]
    if not all((folder / file).is_file() for file in cached):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(
                f"cannot create `{folder}`, the cache of onnxruntime-web: {error.strerror}",
                hint="use another folder: `export ONWARD_CACHE=FOLDER`",
            ) from error
        _download(folder)
    return folder


def _download(cache: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise UnsupportedError(
            f"a page needs {_PACKAGE}, and npm, which downloads it, is not installed",
            hint="install Node.js, or pass the package: `--runtime node_modules/onnxruntime-web`",
        )
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", "--ignore-scripts", "--pack-destination", folder, _PACKAGE]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE)
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode or not archives:
            problem = (done.stderr.strip() or "no message").splitlines()[-1]
            raise UnsupportedError(
                f"npm could not download {_PACKAGE}: {problem}",
                hint="check the network, or pass the package: `--runtime node_modules/onnxruntime-web`",
            )
        with tarfile.open(archives[0]) as archive:
            for file in _FILES:
                member = archive.extractfile(f"package/dist/{file}")
                assert member is not None
                content = member.read()
                is_module = file.endswith("mjs")
                write_file(cache / (file if is_module else f"{file}.gz"), content if is_module else _gzip(content))
