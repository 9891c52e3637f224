"""`onward convert`: a run as files of another framework, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from onward.cli import options
from onward.cli.app import BUILD, command
from onward.cli.console import print_json, remark
from onward.cli.failure import Misuse
from onward.cli.saving import Where, refuse_to_overwrite, target
from onward.cli.work import working
from onward.errors import InvalidModelError, near

if TYPE_CHECKING:
    from onward.convert.files import Framework


@command(
    BUILD,
    "onward convert training.onnx --to torch -o run.pt",
    "onward convert training.onnx --to tensorflow -o saved_model/",
    "onward convert run.pt --like training.onnx -o trained.onnx",
)
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="An .onnx file; or a .pt file, a .keras file or a folder.", show_default=False
        ),
    ],
    to: Annotated[
        Literal["torch", "keras", "jax", "tensorflow"] | None,
        typer.Option("--to", metavar="FRAMEWORK", help="`torch`, `keras`, `jax` or `tensorflow`."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="PATH", help="The file or folder to write. Beside the source unless given."
        ),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option("--like", metavar="MODEL", help="On the way back, the training model that the run was made of."),
    ] = None,
    data: options.Data = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Write a training model for another framework, or read what was trained there.

    A run goes on where it was: weights, optimizer, schedule. What is written needs the framework only. For PyTorch and
    Keras it is a .pt or .keras file, and beside it a .py file that says what it is; for JAX and TensorFlow a folder. On
    the way back the state in them refills the training model `--like`, and no code of theirs is executed.
    """
    if not source.exists():
        raise _missing(source)
    if to is None:
        written = [_back(source, output, like, data, force)]
    elif like is not None:
        raise Misuse("`--like` is for the way back, and `--to` is not", "leave one of them out")
    else:
        written = _forth(source, to, output, force)
    if as_json:
        print_json([str(path) for path in written])


def _missing(source: Path) -> InvalidModelError:
    siblings = [entry.name for entry in source.parent.iterdir()] if source.parent.is_dir() else []
    return InvalidModelError(
        f"there is no file `{source}`", hint=near(source.name, siblings) or "see `onward convert --help`"
    )


def _forth(source: Path, framework: Framework, output: Path | None, force: bool) -> list[Path]:
    import onward
    from onward.convert.files import ENDINGS, places, write

    ending = ENDINGS[framework]
    path = output or source.with_name(f"{source.name.removesuffix('.onnx')}{ending or f'-{framework}'}")
    if ending and path.suffix != ending:
        raise Misuse(f"`{path}` is no name for {framework}", f"write to `{path.with_suffix(ending)}`, for example")
    for place in places(framework, path) if not force else []:
        refuse_to_overwrite(place, source)
    with working(f"converting {source}", source):
        written = write(onward.read(str(source)), framework, path)
    remark(f"wrote {' and '.join(map(str, written))}")
    return written


def _back(source: Path, output: Path | None, like: Path | None, data: Where, force: bool) -> Path:
    import onward
    from onward.convert.files import recognized, restore

    framework = recognized(source)
    if framework is None and source.suffix == ".onnx":
        raise Misuse(f"it is not said what to make of `{source}`", "say for example `--to torch`")
    if framework is None:
        raise Misuse(f"`{source}` is of no framework", "give a .pt file, a .keras file, a folder; or an .onnx file")
    place = target(source, output, "restored", data=data, force=force)
    with working(f"reading {source}"):
        made = restore(framework, source, onward.read(str(like)) if like is not None else None)
    place.write(made)
    return place.path
