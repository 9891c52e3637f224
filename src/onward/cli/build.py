"""`onward prepare`, `gradient` and `lower`: training models, derivatives and plain ONNX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from onward.cli import options
from onward.cli.app import BUILD, Misuse, command
from onward.cli.console import print_json, print_rows, remark, say, word
from onward.cli.options import floats_matching, option, options_from, recomputation, select_given
from onward.cli.output_files import OutputFile, refuse_to_overwrite, target, working
from onward.options import StepOptions, WholeRunOptions

if TYPE_CHECKING:
    from onward import Model
    from onward.inspect import Summary

Catalog = Literal["losses", "optimizers", "schedules", "initializers", "preprocessing", "augmentations"]


@dataclass(frozen=True)
class Entry:
    summary: str
    options: Mapping[str, Any]
    """Options with their defaults."""
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Options with a fixed set of values."""
    required: tuple[str, ...] = ()
    short_names: tuple[str, ...] = ()


def entries(catalog: Catalog) -> dict[str, Entry]:
    """Return the entries of a catalog: names that a recipe can use, with options and defaults."""
    from onward.recipe import initialize, losses, optimizers, schedules
    from onward.recipe.preprocessing.augmentations import AUGMENTATIONS
    from onward.recipe.preprocessing.operations import OPERATIONS
    from onward.recipe.spec import options_of

    listed: dict[str, Entry] = {}
    if catalog == "losses":
        for loss in losses.LOSSES.values():
            short = tuple(name for name, other in losses.LOSSES.items() if other is loss and name != loss.name)
            listed[loss.name] = Entry(loss.summary, {**loss.options, "scale": 1.0}, short_names=short)
    elif catalog == "optimizers":
        for name, optimizer in optimizers.OPTIMIZERS.items():
            choices = {key: value for key, value in optimizer.choices.items() if isinstance(value, tuple)}
            usual = {key: value[0] if isinstance(value, tuple) else value for key, value in optimizer.choices.items()}
            listed[name] = Entry(optimizer.summary, {**optimizer.hyper, **usual}, choices)
    elif catalog == "schedules":
        for name, schedule in schedules.SCHEDULES.items():
            required = tuple(key for key, value in schedule.options.items() if value is None and key != "timescale")
            listed[name] = Entry(schedule.summary, schedule.options, schedule.choices, required)
    elif catalog == "initializers":
        listed["file"] = Entry("the value in the file", {})
        for name, initializer in initialize.INITIALIZERS.items():
            listed[name] = Entry(initializer.summary, initializer.options, initializer.choices)
    else:
        operations = {name: operation.build for name, operation in OPERATIONS.items()}
        for name, function in (operations if catalog == "preprocessing" else AUGMENTATIONS).items():
            options, required = options_of(function)
            listed[name] = Entry((function.__doc__ or "").splitlines()[0], options, required=required)
    return listed


def print_catalog(catalog: Catalog, as_json: bool) -> None:
    catalog_entries = entries(catalog)
    if as_json:
        print_json({name: asdict(entry) for name, entry in catalog_entries.items()})
        return
    for name, entry in catalog_entries.items():
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
"""Rows of `onward describe` that `prepare` does not print."""


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
        Catalog | None,
        option(
            "--list",
            "WHAT",
            "List `losses`, `optimizers`, `schedules`, `initializers`, `preprocessing` or `augmentations` with "
            "options and defaults and exit.",
        ),
    ] = None,
    weights: Annotated[
        Path | None, option("--weights", "CHECKPOINT", "Checkpoint or file of weights that replace those of the model.")
    ] = None,
    config: Annotated[
        Path | None, option("--config", "FILE", "Configuration file with a recipe, as for `train`.")
    ] = None,
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
    **typed: Any,
) -> None:
    """Turn a model into a training model.

    The inference graph is unchanged. The file gets a training step: loss, gradients, optimizer and
    its state, schedule, and initial values.

    A SPEC is a name with options: adamw:lr=1e-3,weight_decay=0.01. In a PATTERN, * and ? match any
    characters.
    """
    if listed is not None:
        print_catalog(listed, as_json)
        return
    recipe = select_given(StepOptions, typed)
    if config is not None:
        from onward.training.config import read_settings, select_recipe

        recipe = select_recipe(read_settings(config)) | recipe
    if model is None or not recipe.keys() & {"loss", "teacher"}:
        missing = "argument `MODEL`" if model is None else "option `--loss`"
        raise Misuse(f"missing {missing}", "see `onward prepare --help`, or `onward prepare --list losses`")
    destination = target(model, output, "training", data=data, force=force)
    import onward

    with working(f"preparing {model}", model):
        training = onward.prepare(str(model) if weights is None else _with_weights(model, weights), **recipe)
    destination.save(training)
    summary = onward.describe(training)
    if as_json:
        print_json({"output": str(destination.path), "model": summary.to_json()})
    else:
        _print_prepared(summary, destination)


def _with_weights(model: Path, weights: Path) -> Model:
    from onward.importing import with_weights

    loaded, rules = with_weights(model, weights)
    for rule in rules:
        remark(rule)
    return loaded


def _print_prepared(summary: Summary, output: OutputFile) -> None:
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
        ("wrote", output.describe()),
        ("next", f"onward describe {output.path}"),
        ("", f"onward check {output.path}"),
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
    of: Annotated[str, option("--of", "NAME", "Value to differentiate: the sum of its elements.")],
    wrt: Annotated[
        list[str],
        option("--wrt", "PATTERN", "Inputs, weights or values to differentiate with respect to. May be repeated."),
    ],
    recompute: options.Recompute = None,
    keep_functions: Annotated[
        bool, option("--keep-functions", None, "Keep functions of the model, and add functions for their gradients.")
    ] = False,
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
) -> None:
    """Add the gradient of a value to a model, as outputs."""
    destination = target(model, output, "gradient", data=data, force=force)
    import onward
    from onward.inspect.formatting import quantity

    with working(f"differentiating {model}", model):
        source = onward.load(str(model))
        names = floats_matching(source, wrt)
        result = onward.gradient(source, of, names, recompute=recomputation(recompute), keep_functions=keep_functions)
    destination.write(result, f"{quantity(len(names), 'gradient')}, {quantity(len(result.graph), 'node')}")


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
            "`step`, `evaluation`, `gradients`, `apply`, `initialization`, `state`, `inference` or `run` "
            "(default: `step`; for a model without training, `inference`).",
        ),
    ] = None,
    everything: Annotated[
        Path | None, option("--all", "FOLDER", "Write all parts except `run` to a folder, as `step.onnx` etc.")
    ] = None,
    steps: Annotated[
        str | None,
        option(
            "--steps",
            "STEPS",
            "Steps of a model with several: an index, a name, or repeats per round such as "
            "`discriminator:2,generator` (default: all steps, with the repeats in the file).",
        ),
    ] = None,
    recompute: options.Recompute = None,
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
    **typed: Any,
) -> None:
    """Turn a training model into plain ONNX that any runtime executes.

    A step takes a batch and the state, and returns metrics and the new state. The metadata
    `train.lowered` says which output replaces which input. A .json file beside the model says the
    same, for runtimes that do not show metadata. The part `inference` is the model itself, with the
    Gradient and optimizer operators of its main graph expanded.

    The part `run` is an entire training. It takes the data, a number of epochs, a seed and the
    state. It returns the new state, the best state, and the metrics of all steps and epochs, as
    `onward train` computes them.
    """
    if everything is not None and (part or output):
        raise Misuse(f"`--all` and `{'--part' if part else '--output'}` exclude each other", "leave one of them out")
    settings = select_given(WholeRunOptions, typed)
    import onward
    from onward.lowering.step import default_part

    with working(f"reading {model}", model):
        source = onward.load(str(model))
    parts = _parts(source, steps) if everything is not None else [part or default_part(source)]
    places: dict[str, OutputFile]
    if everything is None:
        places = {name: target(model, output, name, data=data, force=force) for name in parts}
    else:
        if everything.exists() and not everything.is_dir():
            raise Misuse(f"`--all` needs a folder, and `{everything}` is a file", "onward lower MODEL --all FOLDER")
        everything.mkdir(parents=True, exist_ok=True)
        places = {name: target(model, everything / f"{name}.onnx", name, data=data, force=force) for name in parts}
    for output_file in places.values():
        _check_contract(output_file, force)
    written = []
    for name, output_file in places.items():
        with working(f"lowering {model}", model):
            lowered = onward.lower(source, steps, part=name, recompute=recomputation(recompute), **settings)
        written.append(_write(lowered, output_file))
    if as_json:
        print_json(written if everything is not None else written[0])


def _parts(model: Model, steps: str | None) -> list[str]:
    """Return the parts that a model has: `apply` needs a round of one step."""
    from onward.lowering.rounds import runs_per_step
    from onward.lowering.step import PARTS

    if not model.is_training_model:
        return ["inference"]
    times = runs_per_step(model, steps)
    missing = {"apply"} if sum(times.values()) > 1 else set()
    if all(model.step(index).initialization is None for index in times):
        missing.add("initialization")
    return [name for name in PARTS if name not in missing]


def _check_contract(output: OutputFile, force: bool) -> None:
    """Refuse to overwrite a file with the .json file beside the model."""
    sidecar = output.path.with_suffix(".json")
    if sidecar == output.path:
        raise Misuse(f"`{output.path}` is the path of the .json file", "write the model to an .onnx file")
    if not force:
        refuse_to_overwrite(sidecar)


def _write(lowered: Model, output: OutputFile) -> dict[str, Any]:
    from onward.inspect.formatting import quantity
    from onward.lowering.contract import contract_of
    from onward.model.storage import write_file

    contract = contract_of(lowered).to_json()
    output.save(lowered)
    sidecar = output.path.with_suffix(".json")
    write_file(sidecar, json.dumps(contract, indent=2) + "\n")
    remark(f"wrote {output.describe(sidecar)}: {contract['part']}, {quantity(len(lowered.graph), 'node')}")
    return {"output": str(output.path), "contract": contract}
