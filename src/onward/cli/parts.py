"""`onward merge` and `onward extract`: one model from two, and a part of one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onward.cli import options
from onward.cli.app import CHANGE, command
from onward.cli.arguments import pairs
from onward.cli.saving import target
from onward.cli.work import working

_Names = list[str] | None


@command(
    CHANGE,
    "onward merge encoder.onnx head.onnx -o whole.onnx",
    "onward merge encoder.onnx head.onnx --connect features=input --prefix head/",
)
def merge(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="The model that runs first.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="The model after it.", show_default=False)],
    connect: Annotated[
        _Names,
        typer.Option(
            "--connect",
            metavar="OUTPUT=INPUT",
            help="Which output of the first is which input of the second; in order unless given. May be repeated.",
        ),
    ] = None,
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="TEXT", help="Put this before all names of the second model.")
    ] = "",
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
) -> None:
    """Join two models into one that runs both, and trains both."""
    joins = pairs(connect, "features=input") if connect else None
    place = target(first, output, second.name.removesuffix(".onnx"), data=data, force=force)
    import onward
    from onward.inspect.formatting import quantity

    with working(f"merging {first} and {second}", first, second):
        made = onward.transform.merge(str(first), str(second), joins, prefix=prefix)
    place.write(made, quantity(len(made.steps), "training step"))


@command(
    CHANGE,
    "onward extract training.onnx --to hidden -o encoder.onnx",
    "onward extract training.onnx --from hidden --to logits -o head.onnx",
)
def extract(
    model: options.Model,
    inputs: Annotated[
        _Names,
        typer.Option(
            "--from",
            metavar="NAME",
            help="A value that becomes an input; the model's own unless given. May be repeated.",
        ),
    ] = None,
    outputs: Annotated[
        _Names,
        typer.Option(
            "--to",
            metavar="NAME",
            help="A value that becomes an output; the model's own unless given. May be repeated.",
        ),
    ] = None,
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
) -> None:
    """Cut a part out of a model.

    The part keeps as much of the training as it can carry: what lies behind the new outputs and is needed for the loss
    moves into the training step, and the state of parameters before the new inputs goes.
    """
    place = target(model, output, "part", data=data, force=force)
    import onward
    from onward.inspect.formatting import quantity

    with working(f"cutting {model}", model):
        whole = onward.load(str(model))
        made = onward.transform.extract(
            whole,
            inputs or [value.name or "" for value in whole.inputs],
            outputs or [value.name or "" for value in whole.outputs],
        )
    place.write(made, f"{len(made.graph)} of {quantity(len(whole.graph), 'node')}")
