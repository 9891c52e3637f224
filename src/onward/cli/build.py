"""`onward prepare`, `gradient` and `lower`: training models, derivatives and plain ONNX; and what recipes can name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from onward.cli import options
from onward.cli.app import BUILD, Misuse, command
from onward.cli.console import print_json, print_rows, remark, say, word
from onward.cli.files import Target, refuse_to_overwrite, target, working
from onward.cli.options import floats_matching, option, options_from, recomputation, select_given
from onward.options import StepOptions, WholeRunOptions

if TYPE_CHECKING:
    from onward import Model
    from onward.inspect import Summary

Catalogue = Literal["losses", "optimizers", "schedules", "initializers", "preprocessing", "augmentations"]


@dataclass(frozen=True)
class Entry:
    summary: str
    options: Mapping[str, Any]
    """Every option with its default."""
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """What those options can be that are one of a few words."""
    required: tuple[str, ...] = ()
    short_names: tuple[str, ...] = ()


def entries(catalogue: Catalogue) -> dict[str, Entry]:
    """Return what a recipe can name, with options and defaults."""
    from onward.recipe import initialize, losses, optimizers, schedules
    from onward.recipe.preprocessing.augmentations import AUGMENTATIONS
    from onward.recipe.preprocessing.operations import OPERATIONS
    from onward.recipe.spec import options_of

    found: dict[str, Entry] = {}
    if catalogue == "losses":
        for loss in losses.LOSSES.values():
            short = tuple(name for name, other in losses.LOSSES.items() if other is loss and name != loss.name)
            found[loss.name] = Entry(loss.summary, {**loss.options, "scale": 1.0}, short_names=short)
    elif catalogue == "optimizers":
        for name, optimizer in optimizers.OPTIMIZERS.items():
            choices = {key: value for key, value in optimizer.choices.items() if isinstance(value, tuple)}
            usual = {key: value[0] if isinstance(value, tuple) else value for key, value in optimizer.choices.items()}
            found[name] = Entry(optimizer.summary, {**optimizer.hyper, **usual}, choices)
    elif catalogue == "schedules":
        for name, schedule in schedules.SCHEDULES.items():
            required = tuple(key for key, value in schedule.options.items() if value is None and key != "timescale")
            found[name] = Entry(schedule.summary, schedule.options, schedule.choices, required)
    elif catalogue == "initializers":
        found["file"] = Entry("the value in the file", {})
        for name, initializer in initialize.INITIALIZERS.items():
            found[name] = Entry(initializer.summary, initializer.options, initializer.choices)
    else:
        operations = {name: operation.build for name, operation in OPERATIONS.items()}
        for name, function in (operations if catalogue == "preprocessing" else AUGMENTATIONS).items():
            options, required = options_of(function)
            found[name] = Entry((function.__doc__ or "").splitlines()[0], options, required=required)
    return found


def print_catalogue(catalogue: Catalogue, as_json: bool) -> None:
    found = entries(catalogue)
    if as_json:
        print_json({name: asdict(entry) for name, entry in found.items()})
        return
    for name, entry in found.items():
        say(" or ".join([name, *entry.short_names]), style="bold")
        print_rows([["  ", entry.summary]])
        if entry.options:
            listed = "  ".join(_option(key, value, entry) for key, value in entry.options.items())
            print_rows([["  ", listed]], styles=("", "cyan"))


def _option(name: str, default: Any, entry: Entry) -> str:
    if name in entry.required:
        return f"{name}=?"
    values = entry.choices.get(name, (default,))
    return f"{name}={'|'.join(word(value) for value in values)}"


Part = Literal["step", "evaluation", "gradients", "apply", "initialization", "state", "inference", "run"]

_LEFT_OUT = {"in", "metrics", "trained", "progress", "state"}
"""What `onward describe` tells about a step, and what is said otherwise here or goes without saying."""


@command(
    BUILD,
    "onward prepare digits.onnx --loss cross_entropy",
    "onward prepare net.onnx --loss ce --optimizer adamw:lr=1e-3,weight_decay=0.01 \\\n"
    "      --schedule cosine:steps=1000,warmup=50 --freeze 'backbone.*' --clip norm:1 -o training.onnx",
    "onward prepare net.onnx --loss logits=ce --loss box=huber:scale=0.5 --group '*.bias:weight_decay=0'",
    "onward prepare net.onnx --loss ce --new-head classes=5 --lora 'rank=8,targets=*attn*'",
    "onward prepare gan.onnx --loss score=bce_with_logits:constant=1 --trainable 'maker.*' --append --name maker",
    "onward prepare --list optimizers",
    usage="MODEL --loss SPEC [OPTIONS]",
    **options_from(StepOptions),
)
def prepare(
    model: options.OptionalModel = None,
    *,
    listed: Annotated[
        Catalogue | None,
        option(
            "--list",
            "WHAT",
            "List `losses`, `optimizers`, `schedules`, `initializers`, `preprocessing` or `augmentations` with "
            "options and defaults, and exit.",
        ),
    ] = None,
    config: Annotated[
        Path | None, option("--config", "FILE", "The recipe of a configuration file, as `train` has them.")
    ] = None,
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
    **given: Any,
) -> None:
    """Turn a model into a training model.

    The inference graph stays as it is. Beside it the file gets a training step: loss, gradients, optimizer and its
    state, schedule, and initial values for all of it.

    A SPEC is a name, with options where needed: adamw:lr=1e-3,weight_decay=0.01. In a PATTERN, * and ? stand for any
    characters.
    """
    if listed is not None:
        print_catalogue(listed, as_json)
        return
    recipe = select_given(StepOptions, given)
    if config is not None:
        from onward.training.config import read_settings, select_recipe

        recipe = select_recipe(read_settings(config)) | recipe
    if model is None or not recipe.keys() & {"loss", "teacher"}:
        missing = "argument `MODEL`" if model is None else "option `--loss`"
        raise Misuse(f"missing {missing}", "see `onward prepare --help`, or `onward prepare --list losses`")
    place = target(model, output, "training", data=data, force=force)
    import onward

    with working(f"preparing {model}", model):
        made = onward.prepare(str(model), **recipe)
    place.save(made)
    summary = onward.describe(made)
    if as_json:
        print_json({"output": str(place.path), "model": summary.to_json()})
    else:
        _print_prepared(summary, place)


def _print_prepared(summary: Summary, place: Target) -> None:
    from onward.inspect.formatting import amount, quantity, shape
    from onward.inspect.render import step_rows

    step, frozen = summary.steps[-1], summary.parameters["frozen"].tensors
    fed = [f"{port.name} {port.type} {shape(port.shape)}" for port in (*summary.inputs, *step.inputs)]
    recipe = [(label, text) for label, text in step_rows(summary, step) if label not in _LEFT_OUT]
    rows = [
        ("trains", amount(step.trained) + (f"; {quantity(frozen, 'tensor')} frozen" if frozen else "")),
        *((label, text if isinstance(text, str) else ", ".join(text)) for label, text in recipe),
        ("feed", ", ".join(fed)),
        *(("note", text) for text in summary.remarks),
        ("wrote", place.describe()),
        ("next", f"onward describe {place.path}"),
        ("", f"onward check {place.path}"),
    ]
    print_rows([[label, line] for label, text in rows for line in text.splitlines()], styles=("bold",))


@command(
    BUILD,
    "onward gradient digits.onnx --of logits --wrt image -o saliency.onnx",
    "onward gradient digits.onnx --of logits --wrt 'fc1.*'",
    "onward gradient gpt.onnx --of loss --wrt '*.weight' --recompute 2",
    "onward gradient gpt.onnx --of loss --wrt '*.weight' --recompute '*gelu*' --recompute '*norm*'",
    "onward gradient gpt.onnx --of loss --wrt '*.weight' --keep-functions",
)
def gradient(
    model: options.Model,
    of: Annotated[str, option("--of", "NAME", "The value to differentiate; the sum of its elements.")],
    wrt: Annotated[
        list[str], option("--wrt", "PATTERN", "Inputs, weights or values by which to differentiate. May be repeated.")
    ],
    recompute: options.Recompute = None,
    keep_functions: Annotated[
        bool, option("--keep-functions", None, "Let functions of the model stay, with functions for their gradients.")
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


@command(
    BUILD,
    "onward lower training.onnx -o step.onnx",
    "onward lower training.onnx --part evaluation",
    "onward lower training.onnx --all lowered/ --recompute 2",
    "onward lower gan.onnx --steps discriminator:2,generator",
    "onward lower model.onnx --part inference",
    "onward lower training.onnx --part run --validate --batch-size 64 --patience 5 -o train.onnx",
    **options_from(WholeRunOptions),
)
def lower(
    model: options.Model,
    part: Annotated[
        Part | None,
        option(
            "--part",
            "PART",
            "`step`, `evaluation`, `gradients`, `apply`, `initialization`, `state`, `inference` or `run`; unless given "
            "`step`, or `inference` of a model without training.",
        ),
    ] = None,
    everything: Annotated[
        Path | None, option("--all", "FOLDER", "Write all parts but `run` into a folder, as `step.onnx` etc.")
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
    **given: Any,
) -> None:
    """Turn a training model into plain ONNX, which any runtime executes.

    A step takes a batch and the state, and gives metrics and the new state. Which output replaces which input says the
    metadata `train.lowered`, and the .json file beside the model for runtimes that do not show metadata. The part
    `inference` is the model itself, with Gradient and optimizer operators of its main graph written out.

    The part `run` is entire training: it takes whole data, a number of epochs, a seed and the state, and gives the new
    state, the best one and the metrics of all steps and epochs, as `onward train` computes them.
    """
    if everything is not None and (part or output):
        raise Misuse(f"`--all` and `{'--part' if part else '--output'}` do not go together", "leave one of them out")
    settled = select_given(WholeRunOptions, given)
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
            made = onward.lower(source, steps, part=name, recompute=recomputation(recompute), **settled)
        written.append(_write(made, place))
    if as_json:
        print_json(written if everything is not None else written[0])


def _parts(model: Model, steps: str | None) -> list[str]:
    """All that a model has: without steps only inference; a round of several has no `apply`."""
    from onward.lowering.rounds import runs_per_step
    from onward.lowering.step import PARTS

    if not model.is_training_model:
        return ["inference"]
    times = runs_per_step(model, steps)
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
    remark(f"wrote {place.describe(beside)}: {contract['part']}, {quantity(len(made.graph), 'node')}")
    return {"output": str(place.path), "contract": contract}
