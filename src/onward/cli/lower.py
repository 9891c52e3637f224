"""`onward lower`: a training model as plain ONNX, for loops in any language."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from onward.cli import options
from onward.cli.app import BUILD, Misuse, command
from onward.cli.console import print_json, remark
from onward.cli.files import Target, refuse_to_overwrite, target, working
from onward.cli.options import option, recomputation

if TYPE_CHECKING:
    from onward import Model

Part = Literal["step", "evaluation", "gradients", "apply", "initialization", "state", "inference"]


@command(
    BUILD,
    "onward lower training.onnx -o step.onnx",
    "onward lower training.onnx --part evaluation",
    "onward lower training.onnx --all lowered/ --recompute 2",
    "onward lower gan.onnx --steps discriminator:2,generator",
    "onward lower model.onnx --part inference",
)
def lower(
    model: options.Model,
    part: Annotated[
        Part | None,
        option(
            "--part",
            "PART",
            "`step`, `evaluation`, `gradients`, `apply`, `initialization`, `state` or `inference`; unless given "
            "`step`, or `inference` of a model without training.",
        ),
    ] = None,
    everything: Annotated[
        Path | None, option("--all", "FOLDER", "Write all parts into a folder, as `step.onnx` etc.")
    ] = None,
    steps: Annotated[
        str | None,
        option(
            "--steps",
            "STEPS",
            "Of a model with several: a number or a name, or how often each runs: `discriminator:2,generator`; "
            "unless given, all, as often as the file says.",
        ),
    ] = None,
    recompute: options.Recompute = None,
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Turn a training model into plain ONNX, which any runtime executes.

    A step takes a batch and the state, and gives metrics and the new state. Which output replaces which input says the
    metadata `train.lowered`, and the .json file beside the model for runtimes that do not show metadata. The part
    `inference` is the model itself, with Gradient and optimizer operators of its main graph written out.
    """
    if everything is not None and (part or output):
        raise Misuse(f"`--all` and `{'--part' if part else '--output'}` do not go together", "leave one of them out")
    import onward
    from onward.lowering.step import default_part

    with working(f"reading {model}", model):
        source = onward.load(str(model))
    parts = _parts(source, steps) if everything is not None else [part or default_part(source)]
    places: dict[str, Target]
    if everything is None:
        places = {name: target(model, output, name, data=data, force=force) for name in parts}
    else:
        if everything.exists() and not everything.is_dir():
            raise Misuse(f"`{everything}` is a file, and `--all` writes into a folder", "name a folder")
        everything.mkdir(parents=True, exist_ok=True)
        places = {name: target(model, everything / f"{name}.onnx", name, data=data, force=force) for name in parts}
    for place in places.values():
        _settle_contract(place, force)
    written = []
    for name, place in places.items():
        with working(f"lowering {model}", model):
            made = onward.lower(source, steps, part=name, recompute=recomputation(recompute))
        written.append(_write(made, place))
    if as_json:
        print_json(written if everything is not None else written[0])


def _parts(model: Model, steps: str | None) -> list[str]:
    """All that a model has: without steps only inference; a round of several has no `apply`."""
    from onward.lowering.rounds import times_of
    from onward.lowering.step import PARTS

    if not model.is_training_model:
        return ["inference"]
    times = times_of(model, steps)
    missing = {"apply"} if sum(times.values()) > 1 else set()
    if all(model.step(index).initialization is None for index in times):
        missing.add("initialization")
    return [name for name in PARTS if name not in missing]


def _settle_contract(place: Target, force: bool) -> None:
    """Refuse to lose a file to the .json file that goes beside the model."""
    beside = place.path.with_suffix(".json")
    if beside == place.path:
        raise Misuse(f"`{place.path}` is the place of the .json file", "write the model to an .onnx file")
    if not force:
        refuse_to_overwrite(beside)


def _write(made: Model, place: Target) -> dict[str, Any]:
    from onward.inspect.formatting import quantity
    from onward.lowering.contract import contract_of
    from onward.model.storage import write_file

    contract = contract_of(made).to_json()
    place.save(made)
    beside = place.path.with_suffix(".json")
    write_file(beside, json.dumps(contract, indent=2) + "\n")
    remark(f"wrote {place.described(beside)}: {contract['part']}, {quantity(len(made.graph), 'node')}")
    return {"output": str(place.path), "contract": contract}
