"""`onward grad`: the derivative of a model, as a model."""

from __future__ import annotations

from typing import Annotated

from onward.cli import options
from onward.cli.app import BUILD, command
from onward.cli.files import target, working
from onward.cli.options import floats_matching, option, recomputation


@command(
    BUILD,
    "onward grad digits.onnx --of logits --wrt image -o saliency.onnx",
    "onward grad digits.onnx --of logits --wrt 'fc1.*'",
    "onward grad gpt.onnx --of loss --wrt '*.weight' --recompute 2",
    "onward grad gpt.onnx --of loss --wrt '*.weight' --recompute '*gelu*' --recompute '*norm*'",
    "onward grad gpt.onnx --of loss --wrt '*.weight' --keep-functions",
)
def grad(
    model: options.Model,
    of: Annotated[str, option("--of", "NAME", "The value to differentiate; the sum of its elements.")],
    wrt: Annotated[
        list[str],
        option("--wrt", "PATTERN", "Inputs, weights or values by which to differentiate. May be repeated."),
    ],
    recompute: options.Recompute = None,
    keep_functions: Annotated[
        bool,
        option("--keep-functions", None, "Let functions of the model stay, with functions for their gradients."),
    ] = False,
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
) -> None:
    """Add the gradient of a value to a model, as outputs."""
    place = target(model, output, "gradient", data=data, force=force)
    import onward
    from onward.inspect.formatting import quantity

    with working(f"differentiating {model}", model):
        source = onward.load(str(model))
        names = floats_matching(source, wrt)
        made = onward.gradient(source, of, names, recompute=recomputation(recompute), keep_functions=keep_functions)
    place.write(made, f"{quantity(len(names), 'gradient')}, {quantity(len(made.graph), 'node')}")
