"""`onward check-gradients`: whether the gradients of a model are those that differences show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli import options
from onward.cli.app import LOOK, command
from onward.cli.arguments import floats_matching
from onward.cli.console import print_json, print_rows, say
from onward.cli.failure import FAILED
from onward.cli.work import working

if TYPE_CHECKING:
    from onward.gradcheck import Report


@command(
    LOOK,
    "onward check-gradients training.onnx",
    "onward check-gradients digits.onnx --of logits --wrt 'fc1.*' --wrt image --order 2",
    "onward check-gradients training.onnx --inputs batch.npz --json | jq .culprit",
    name="check-gradients",
)
def check_gradients(
    model: options.Model,
    of: Annotated[
        str | None,
        typer.Option("--of", metavar="NAME", help="The value that is differentiated; the loss, or the first output."),
    ] = None,
    wrt: Annotated[
        list[str] | None,
        typer.Option(
            "--wrt",
            metavar="PATTERN",
            help="Inputs, weights or values by which it is differentiated; all parameters and inputs unless given. "
            "May be repeated.",
        ),
    ] = None,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="FILE", help="An .npz file with inputs; made up unless given.")
    ] = None,
    directions: Annotated[
        int, typer.Option("--directions", metavar="N", min=1, help="How many random directions to try for each.")
    ] = 1,
    order: Annotated[
        int, typer.Option("--order", metavar="N", min=1, max=2, help="2: check the gradient of the gradient, too.")
    ] = 1,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", metavar="X", min=0, help="How far off a gradient may be, relative to its size."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="For directions and made-up inputs.")] = 0,
    step: options.Step = 0,
    as_json: options.Json = False,
) -> None:
    """Compare gradients with differences, along random directions.

    The gradient is ours; the differences need nothing but the model itself, which is computed in float64 wherever ONNX
    Runtime can. Where a gradient is wrong, the operator to blame is named. Exits with 1 if one is wrong or not finite.
    """
    import onward

    with working(f"checking the gradients of {model}", model):
        source = onward.load(str(model))
        report = onward.check_gradients(
            source,
            of,
            floats_matching(source, wrt) if wrt else None,
            inputs=inputs,
            directions=directions,
            order=order,
            seed=seed,
            tolerance=tolerance,
            step=step,
        )
    if as_json:
        print_json({"file": str(model), **report.to_json()})
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(FAILED)


def _print(report: Report) -> None:
    say(report.heading, style="bold")
    print_rows(report.table())
    for remark in report.remarks:
        say(remark, style="bold red")
