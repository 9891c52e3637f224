"""`onward verify`: whether all engines agree about a training model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onward.cli import options
from onward.cli.app import LOOK, command
from onward.cli.console import print_json, print_rows, remark, say
from onward.cli.failure import FAILED
from onward.cli.work import working


@command(
    LOOK,
    "onward verify training.onnx",
    "onward verify training.onnx --engine onnxruntime --engine torch --steps 50",
    "onward verify training.onnx --inputs batch.npz --json | jq '.rows[] | {engine, verdict}'",
)
def verify(
    model: options.Model,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine", metavar="NAME", help="An engine; all that are installed unless given. May be repeated."
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="How many steps to run.")] = 5,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="FILE", help="An .npz file with a batch; made up unless given.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance", metavar="X", min=0, help="How far apart engines may be, relative to a tensor's size."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="For made-up inputs.")] = 0,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the step where an engine can.")] = False,
    step: options.Step = 0,
    as_json: options.Json = False,
) -> None:
    """Run a few steps on every installed engine, and show where they agree and where not.

    PyTorch, JAX and TensorFlow take part twice, with their own derivative and with Onward's. Where an engine differs,
    the first value that does is named. Exits with 1 if one differs.
    """
    import onward

    with working(f"running {model}", model):
        report = onward.verify(
            str(model),
            engines=engine or None,
            steps=steps,
            inputs=inputs,
            tolerance=tolerance,
            seed=seed,
            step=step,
            compile=compiled,
            on_start=lambda name: remark(f"running {name}"),
        )
    if as_json:
        print_json(report.to_json())
    else:
        say(report.heading, style="bold")
        print_rows(report.table())
        for text in report.remarks:
            say(text)
    if not report.ok:
        raise typer.Exit(FAILED)
