"""`onward.page`: the folder of a page, written."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from onward.errors import ArgumentError, UnsupportedError, WriteError
from onward.model import Model, Source, load
from onward.model.storage import write_file
from onward.options import PageOptions, with_options
from onward.training.config import Config
from onward.training.data import in_parts
from onward.training.preparation import prepare_training, with_head_of
from onward.transform.training import strip
from onward.web.content import Content

_PAGE_ALONE = ("title", "picture", "runtime")
_DESCRIPTION = "page.json"


@dataclasses.dataclass(frozen=True)
class _Arguments(PageOptions):
    model: Source = None  # type: ignore[assignment]  # is asked for below, with a hint
    _: dataclasses.KW_ONLY
    output: str | os.PathLike[str] = "site"
    force: bool = False


@dataclasses.dataclass(frozen=True)
class Page:
    """A page on disk."""

    path: Path
    notes: tuple[str, ...]
    """What its author should know."""
    sizes: dict[str, int]
    """Bytes that a browser loads: of the `page` itself, the `model` and `data`, and the `runtime`; `graphics` is loaded
    in the place of the latter where somebody chooses that."""

    @property
    def loaded(self) -> int:
        """Bytes that a browser loads before it can train."""
        return sum(size for name, size in self.sizes.items() if name != "graphics")


@with_options(_Arguments)
def page(output: str | os.PathLike[str] = "site", force: bool = False, **given: Any) -> Page:
    """Write a page that trains a model in the browser: a folder for any web server, which asks no other.

        onward.page("digits.onnx", "digits.npz", loss="cross_entropy", validation=0.1, output="site")

    Who opens it trains the model, watches, stops and goes on, tries it, and downloads it. Batches come in the order of
    `onward.train`, and losses are the same.

    - `model`: a training model, or any model and a recipe: `loss=...`, `optimizer=...` as in `onward.prepare`
    - `output`: the folder
    - `force`: write into a folder that holds something else
    """
    if given.get("model") is None:
        raise ArgumentError("`page` needs `model`", hint="`help(onward.page)` says what that is")
    folder = Path(output)
    _refuse_to_fill(folder, force)
    own = {name: given.pop(name, None) for name in _PAGE_ALONE}
    source = find_runtime(own["runtime"])
    content, title = _content(given, own["picture"])
    folder.mkdir(parents=True, exist_ok=True)
    runtime = add_runtime(folder / "runtime", source)
    sizes = _write_source(folder)
    for name, data in content.files.items():
        write_file(folder / name, data)
    told = {"title": own["title"] or title, **content.description, "runtime": {"version": VERSION, **runtime}}
    write_file(folder / _DESCRIPTION, json.dumps(told, indent=1) + "\n")
    return Page(folder, tuple(content.notes), _sizes(folder, sizes, content, runtime))


def _content(given: dict[str, Any], picture: str | None) -> tuple[Content, str]:
    """What the page trains, and what the model is called."""
    data, validation, notes = in_parts(given.get("data"), given.get("validation"))
    settings = {**given, "data": data if data is not None else "", "validation": validation}
    config = dataclasses.replace(Config.from_arguments("page", settings), data=data)
    original = load(config.model)
    made = prepare_training(original, data, config.columns, given.get("batch_size"), config.recipe, config.seed or 0)
    config = dataclasses.replace(config, batch_size=made.batch_size, seed=config.seed or 0)
    plain = strip(original) if original.is_training_model else original
    trained = with_head_of(config.recipe, plain, config.seed or 0)
    with config.start_engine(made.model) as engine:
        content = Content(trained, made.model, engine, config, made.data, picture)
    content.notes[:0] = [*notes, *made.notes]
    return content, _name(original)


def _name(model: Model) -> str:
    return model.path.stem if model.path else model.graph.name or "model"


def _refuse_to_fill(folder: Path, force: bool) -> None:
    """Never mix a page with other files: the folder is empty, or holds a page already."""
    if folder.exists() and not folder.is_dir():
        raise WriteError(f"`{folder}` is a file, and a page is a folder", hint="name another one with `-o`")
    if force or not folder.exists() or (folder / _DESCRIPTION).exists() or not any(folder.iterdir()):
        return
    raise WriteError(f"`{folder}` holds other files", hint="name another folder with `-o`, or use `--force`")


def _write_source(folder: Path) -> int:
    """The page itself; how many bytes it is."""
    total = 0
    for file in files("onward.web").joinpath("static").iterdir():
        content = file.read_bytes()
        write_file(folder / file.name, content)
        total += len(content)
    return total


def _sizes(folder: Path, source: int, content: Content, runtime: dict[str, Any]) -> dict[str, int]:
    def loaded(what: str) -> int:
        return sum((folder / "runtime" / file).stat().st_size for file in runtime[what].values())

    at_once = ("step.onnx", "evaluation.onnx", "training.onnx")
    return {
        "page": source + (folder / _DESCRIPTION).stat().st_size,
        "model": sum(len(content.files[name]) for name in at_once),
        "data": len(content.files["data.bin"]),
        "runtime": loaded("processor"),
        "graphics": loaded("graphics"),
    }


# ---- runtime ---------------------------------------------------------------------------------------------------------


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
