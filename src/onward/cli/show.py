"""`onward show`: what is in a file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli import options
from onward.cli.app import LOOK, command
from onward.cli.console import out, print_fields, print_json, remark, say
from onward.cli.work import working
from onward.errors import WriteError

if TYPE_CHECKING:
    from onward.checkpoint import Checkpoint


@command(
    LOOK,
    "onward show training.onnx",
    "onward show training.onnx --params",
    "onward show training.onnx --graph training.svg",
    "onward show training.onnx --json | jq .",
    "onward show checkpoint-500/",
    "onward show checkpoint-500/ --unsafe",
)
def show(
    model: options.Model,
    params: Annotated[
        bool,
        typer.Option(
            "--params", help="List all tensors: trained, frozen, constant; of a checkpoint, also what optimizers keep."
        ),
    ] = False,
    graph: Annotated[
        Path | None, typer.Option("--graph", metavar="FILE", help="Draw the training graph into an .svg file.")
    ] = None,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="List the code that a loader that trusts a checkpoint would execute.")
    ] = False,
    step: options.Step = 0,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Show what is in a file.

    What goes in and out, how many parameters there are and which are trained, loss, optimizer, schedule, state, and how
    far it is trained. It may also be a checkpoint of PyTorch, Lightning or Hugging Face, a file or a folder: nothing in
    it is executed.
    """
    from onward.checkpoint import is_checkpoint
    from onward.inspect import describe, draw, render, render_parameters
    from onward.model import load
    from onward.model.storage import write_file

    if unsafe:
        _show_code(model, as_json)
        return
    if is_checkpoint(model):
        _show_checkpoint(model, params, as_json)
        return

    if graph is not None and graph.exists() and not force:
        raise WriteError(f"`{graph}` exists", hint="draw into another file, or overwrite it with `--force`")
    with working(f"reading {model}", model):
        source = load(model)
        summary = describe(source)
    if graph is not None:
        with working("laying out the graph", model):
            picture = draw(source, step)
        write_file(graph, picture)
        remark(f"wrote {graph}")
    if as_json:
        print_json(summary.to_json())
    elif params:
        render_parameters(summary, out())
    elif graph is None:
        render(summary, out())


def _show_code(path: Path, as_json: bool) -> None:
    from onward.checkpoint.opening import list_code

    code, wrong = list_code(path)
    if as_json:
        print_json([each._asdict() for each in code])
    for each in () if as_json else code:
        say(f"{each.file}  {each.name}{each.call}")
    if wrong is not None:
        raise wrong
    if not code and not as_json:
        say("it names no code")


def _show_checkpoint(path: Path, params: bool, as_json: bool) -> None:
    from onward.checkpoint import open_checkpoint
    from onward.checkpoint.summary import lines, tensor_lines, to_json

    checkpoint = open_checkpoint(path)
    if as_json:
        print_json(to_json(checkpoint))
    elif params:
        for line in tensor_lines(checkpoint):
            say(line)
    else:
        say(path.name or str(path), style="bold")
        print_fields([*lines(checkpoint), *_way_on(path, checkpoint)], indent="  ")


def _way_on(path: Path, checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """How to go on from there, if there is an optimizer to go on with."""
    from onward.checkpoint.opening import format_of

    if not checkpoint.optimizers:
        return []
    format = format_of(path)
    has_graph = format is not None and format.graph is not None
    like = "" if has_graph or checkpoint.configuration.get("architectures") else " --like model.onnx"
    return [("go on", f"onward convert {shlex.quote(str(path))}{like} -o run.onnx")]
