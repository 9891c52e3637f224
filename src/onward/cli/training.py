"""`onward reset`, `strip` and `refresh`: training started over, taken off a model, and put back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onward.cli import options
from onward.cli.app import CHANGE, command
from onward.cli.saving import target
from onward.cli.work import working


@command(
    CHANGE,
    "onward reset training.onnx",
    "onward reset trained.onnx --seed 7 -o fresh.onnx",
)
def reset(
    model: options.Model,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="Draw other random numbers; those of the file unless given."),
    ] = None,
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
) -> None:
    """Start over: weights, moments and counters as the initialization of the file makes them.

    What `onward prepare` writes as initialization are the weights that the model had, unless `--init` said otherwise,
    and zeros for what optimizers keep. State without an initialization stays as it is stored, and is named.
    """
    place = target(model, output, "reset", data=data, force=force)
    import onward
    from onward.engines.initialization import kept
    from onward.errors import listed

    with working(f"resetting {model}", model):
        made = onward.reset(str(model), seed=seed)
    stored = kept(made)
    place.write(made, f"kept as stored: {listed(stored, 10)}" if stored else "all state is as initialised")


@command(
    CHANGE,
    "onward strip training.onnx",
    "onward strip training.onnx -o trained.onnx",
)
def strip(
    model: options.Model,
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
) -> None:
    """Take the training off, and keep the weights as they are."""
    place = target(model, output, "inference", data=data, force=force)
    import onward
    from onward.inspect.formatting import quantity

    with working(f"stripping {model}", model):
        before = onward.load(str(model))
        made = onward.transform.strip(before)
    place.write(made, f"without {quantity(len(before.steps), 'training step')}")


@command(
    CHANGE,
    "onward refresh optimized.onnx --training training.onnx",
    "onward refresh optimized.onnx --training training.onnx -o training.onnx --force",
)
def refresh(
    model: Annotated[
        Path, typer.Argument(metavar="CHANGED", help="The model as another tool has left it.", show_default=False)
    ],
    training: Annotated[
        Path, typer.Option("--training", metavar="FILE", help="The training model from before.", show_default=False)
    ],
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
) -> None:
    """Put training back that another tool has dropped.

    Tools that change the inference graph lose what the file says about training. Where the two no longer match, nothing
    is guessed: all such places are named, and nothing is written.
    """
    place = target(model, output, "training", data=data, force=force)
    import onward
    from onward.inspect.formatting import quantity

    with working(f"joining {model} and the training of {training}", model, training):
        made = onward.transform.refresh(str(model), str(training))
    place.write(made, quantity(len(made.steps), "training step"))
