"""`onward.page`: the folder of a page, written."""

from __future__ import annotations

import dataclasses
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from onward.errors import ArgumentError, WriteError
from onward.model import Model, Source, load
from onward.model.storage import write_file
from onward.options import PageOptions, taking
from onward.training.config import Config
from onward.training.data import in_parts
from onward.training.preparation import prepare_training, with_head_of
from onward.transform.training import strip
from onward.web.content import Content
from onward.web.runtime import VERSION, add_runtime, find_runtime

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


@taking(_Arguments)
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
