"""`onward rename` and `onward prefix`: other names for the values of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from onward.cli import options
from onward.cli.app import CHANGE, command
from onward.cli.arguments import pairs
from onward.cli.failure import Misuse
from onward.cli.saving import target
from onward.cli.work import working


@command(
    CHANGE,
    "onward rename training.onnx fc1.weight=encoder.weight fc1.bias=encoder.bias",
    "onward rename training.onnx logits=scores -o renamed.onnx",
)
def rename(
    model: options.Model,
    names: Annotated[list[str], typer.Argument(metavar="OLD=NEW...", help="Values to rename.", show_default=False)],
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
) -> None:
    """Rename inputs, outputs, weights and other values.

    They are renamed wherever the name stands: in all graphs, in Gradients, in bindings, in what the file records. The
    optimizer state of a parameter is renamed along with it.
    """
    wanted = pairs(names, "fc1.weight=encoder.weight")
    place = target(model, output, "renamed", data=data, force=force)
    import onward
    from onward.inspect.formatting import quantity

    with working(f"renaming in {model}", model):
        made = onward.transform.rename(str(model), wanted)
    place.write(made, f"renamed {quantity(len(wanted), 'value')}")


@command(
    CHANGE,
    "onward prefix encoder.onnx encoder/",
    "onward prefix encoder.onnx encoder. -o named.onnx",
)
def prefix(
    model: options.Model,
    text: Annotated[str, typer.Argument(metavar="PREFIX", help="What to put before names.", show_default=False)],
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
) -> None:
    """Put a prefix before the names of all values and nodes."""
    if not text:
        raise Misuse("the prefix is empty", "write for example `onward prefix encoder.onnx encoder/`")
    place = target(model, output, "prefixed", data=data, force=force)
    import onward

    with working(f"renaming in {model}", model):
        made = onward.transform.add_prefix(str(model), text)
    place.write(made)
