"""`onward inline`, `onward opset` and `onward data`: the same model in another form."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from onward.cli import options
from onward.cli.app import CHANGE, command
from onward.cli.saving import target
from onward.cli.work import working


@command(
    CHANGE,
    "onward inline training.onnx",
    "onward inline training.onnx --function 'onward.*' -o plain.onnx",
)
def inline(
    model: options.Model,
    functions: Annotated[
        list[str] | None,
        typer.Option(
            "--function",
            metavar="PATTERN",
            help="Which functions, as domain.Name; all unless given. May be repeated.",
        ),
    ] = None,
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
) -> None:
    """Replace calls of functions by what the functions compute."""
    place = target(model, output, "inlined", data=data, force=force)
    import onward
    from onward.inspect.formatting import quantity

    with working(f"inlining in {model}", model):
        before = onward.load(str(model))
        made = onward.transform.inline(before, functions or ["*"])
    gone = len(before.functions) - len(made.functions)
    place.write(made, f"inlined {gone} of {quantity(len(before.functions), 'function')}")


@command(
    CHANGE,
    "onward opset model.onnx 21",
    "onward opset training.onnx 18 -o older.onnx",
)
def opset(
    model: options.Model,
    version: Annotated[
        int,
        typer.Argument(metavar="VERSION", help="A version of the standard operator set.", min=1, show_default=False),
    ],
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
) -> None:
    """Convert a model, training included, to another operator set."""
    place = target(model, output, f"opset{version}", data=data, force=force)
    import onward

    with working(f"converting {model}", model):
        before = onward.load(str(model))
        made = onward.transform.convert_opset(before, version)
    place.write(made, f"operator set {before.opset} to {made.opset}")


@command(
    CHANGE,
    "onward data training.onnx --to safetensors",
    "onward data training.onnx --to none -o single-file.onnx",
)
def data(
    model: options.Model,
    to: Annotated[
        Literal["none", "data", "safetensors"],
        typer.Option(
            "--to",
            metavar="WHERE",
            help="`none` (into the file), or `data` or `safetensors` (into a file beside it).",
            show_default=False,
        ),
    ],
    output: options.Output = None,
    force: options.Force = False,
) -> None:
    """Move tensors in and out of the file.

    A .safetensors file is read by ONNX Runtime, and by everything else that knows the format.
    """
    place = target(model, output, "single" if to == "none" else "external", data=to, force=force)
    import onward

    with working(f"reading {model}", model):
        made = onward.load(str(model))
    place.write(made)
