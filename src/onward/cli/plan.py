"""`onward plan`: what a training takes on many devices, on paper; and a file that says how it is divided."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from onward.cli import options
from onward.cli.app import LOOK, command
from onward.cli.console import print_json, remark, say
from onward.cli.files import target, working
from onward.cli.options import option, options_from, select_given
from onward.options import PlanOptions


@command(
    LOOK,
    "onward plan model.onnx --devices 64 --memory 80GB",
    "onward plan llama.onnx --shape tokens=N,4096 --devices 8 --memory 80GB --recompute-blocks --bandwidth 450GB \\\n"
    "      --flops 989T",
    "onward plan training.onnx --devices 16 --strategy fsdp --json | jq .estimates[0].memory",
    "onward plan training.onnx --devices 8 --strategy fsdp -o sharded.onnx",
    **options_from(PlanOptions),
)
def plan(
    model: options.Model,
    *,
    step: options.Step = 0,
    output: Annotated[
        Path | None, option("--output -o", "FILE", "Write the model with the plan in it: devices, and what is divided.")
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
    **given: Any,
) -> None:
    """Say what a training would take on many devices, without running it.

    Parameters, gradients, state of the optimizer and activations on each device, what they must send each other, and
    with --bandwidth and --flops how long a step takes: for each strategy, or for one. Weights of the model are not read
    and need not be there.
    """
    place = target(model, output, "sharded", force=force) if output is not None else None
    import onward
    from onward.inspect.formatting import quantity
    from onward.planning.annotate import annotate

    with working(f"planning for {model}", model):
        found = onward.plan(str(model), step=step, **select_given(PlanOptions, given))
    if place is not None:
        sharding = found.sharding()
        annotate(model, sharding, place.path)
        remark(f"wrote {place.path}: {sharding.name} on {quantity(sharding.devices, 'device')}")
    if as_json:
        print_json(found.to_json())
    else:
        say(str(found))
