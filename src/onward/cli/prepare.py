"""`onward prepare`: from a model to a training model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from onward.cli import options
from onward.cli.app import BUILD, command
from onward.cli.arguments import specs_by_pattern
from onward.cli.catalogue import Catalogue, print_catalogue
from onward.cli.console import print_json, print_rows, size, working
from onward.cli.failure import Misuse
from onward.cli.saving import target

if TYPE_CHECKING:
    from onward import Model

_WHAT, _HOW, _START = "What is trained", "How it is trained", "Where it starts"


def _option(panel: str, flag: str, metavar: str | None, help: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel=panel, show_default=False)


@command(
    BUILD,
    "onward prepare digits.onnx --loss cross_entropy",
    "onward prepare net.onnx --loss ce --optimizer adamw:lr=1e-3,weight_decay=0.01 \\\n"
    "      --schedule cosine:steps=1000,warmup=50 --freeze 'backbone.*' --clip-norm 1 -o training.onnx",
    "onward prepare net.onnx --loss logits=ce --loss box=huber:scale=0.5 --group '*.bias:weight_decay=0'",
    "onward prepare --list optimizers",
)
def prepare(
    model: options.OptionalModel = None,
    loss: Annotated[
        list[str] | None,
        _option(
            _HOW,
            "--loss",
            "SPEC",
            "What to minimise: a name with options, `output=SPEC` for one of several outputs, a loss as an .onnx file, or "
            "`value:NAME` for one that the model computes. Several are added up.",
        ),
    ] = None,
    optimizer: Annotated[
        str, _option(_HOW, "--optimizer", "SPEC", "Such as sgd:lr=0.1,momentum=0.9; adamw unless given.")
    ] = "adamw",
    schedule: Annotated[
        list[str] | None,
        _option(
            _HOW,
            "--schedule",
            "SPEC",
            "How the learning rate changes, such as cosine:steps=1000,warmup=50. Several follow one another, each but "
            "the last with `until`.",
        ),
    ] = None,
    trainable: Annotated[
        list[str] | None, _option(_WHAT, "--trainable", "PATTERN", "Train these alone; may be repeated.")
    ] = None,
    freeze: Annotated[
        list[str] | None, _option(_WHAT, "--freeze", "PATTERN", "Leave these as they are; may be repeated.")
    ] = None,
    group: Annotated[
        list[str] | None,
        _option(
            _WHAT,
            "--group",
            "PATTERN:OPTIONS",
            "Settings of the optimizer for some parameters, such as '*.bias:weight_decay=0'; may be repeated.",
        ),
    ] = None,
    clip_norm: Annotated[float | None, _option(_HOW, "--clip-norm", "X", "Limit the norm of all gradients.")] = None,
    clip_tensor_norm: Annotated[
        float | None, _option(_HOW, "--clip-tensor-norm", "X", "Limit the norm of each gradient.")
    ] = None,
    clip_value: Annotated[
        float | None, _option(_HOW, "--clip-value", "X", "Limit each element of the gradients.")
    ] = None,
    accumulate: Annotated[int, _option(_HOW, "--accumulate", "N", "Make one update of N batches.")] = 1,
    ema: Annotated[float | None, _option(_HOW, "--ema", "DECAY", "Keep a moving average of the parameters.")] = None,
    loss_scale: Annotated[
        str | None, _option(_HOW, "--loss-scale", "X", "Scale the loss for float16: a number, or `dynamic`.")
    ] = None,
    no_master_weights: Annotated[
        bool, _option(_HOW, "--no-master-weights", None, "Keep no float32 copies of low-precision parameters.")
    ] = False,
    variance: Annotated[
        Literal["population", "sample"],
        _option(_HOW, "--variance", None, "The running variance of BatchNormalization: ONNX's, or PyTorch's `sample`."),
    ] = "population",
    init: Annotated[
        list[str] | None,
        _option(
            _START,
            "--init",
            "SPEC",
            "What a reset gives parameters: `file`, the values in the file, unless given; or an initializer such as "
            "kaiming_normal, or `PATTERN=SPEC` for some. May be repeated.",
        ),
    ] = None,
    seed: Annotated[int, _option(_START, "--seed", "N", "For initial values and random numbers in training.")] = 0,
    append: Annotated[bool, _option(_WHAT, "--append", None, "Add a step to those that the model has.")] = False,
    listed: Annotated[
        Catalogue | None, typer.Option("--list", help="List what there is to choose from, and exit.")
    ] = None,
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Turn a model into a training model.

    The inference graph stays as it is. Beside it the file gets a training step: loss, gradients, optimizer and its state,
    schedule, and initial values for all of it.

    A SPEC is a name with options, such as adamw:lr=1e-3,weight_decay=0.01. In a PATTERN, * and ? stand for any characters.
    """
    if listed is not None:
        print_catalogue(listed, as_json)
        return
    if model is None or not loss:
        missing = "argument `MODEL`" if model is None else "option `--loss`"
        raise Misuse(f"missing {missing}", "see `onward prepare --help`, or `onward prepare --list losses`")
    place = target(model, output, "training", data=data, force=force)
    recipe: dict[str, Any] = {
        "optimizer": optimizer,
        "schedule": _one_or_all(schedule),
        "trainable": trainable,
        "freeze": freeze or (),
        "groups": group or (),
        "clip": _clip(norm=clip_norm, tensor_norm=clip_tensor_norm, value=clip_value),
        "accumulate": accumulate,
        "ema": ema,
        "loss_scale": loss_scale,
        "master_weights": False if no_master_weights else None,
        "init": specs_by_pattern(init or ()) or "file",
        "variance": variance,
        "seed": seed,
        "append": append,
    }
    import onward

    with working(f"preparing {model}"):
        made = onward.prepare(str(model), loss=_one_or_all(loss), **recipe)
    place.save(made)
    if as_json:
        print_json({"output": str(place.path), "model": onward.describe(made).to_json()})
    else:
        _summarise(made, place.path)


def _one_or_all(given: list[str] | None) -> str | list[str] | None:
    return given[0] if given and len(given) == 1 else given or None


def _clip(**limits: float | None) -> dict[str, float] | None:
    given = {name: limit for name, limit in limits.items() if limit is not None}
    if len(given) > 1:
        flags = " and ".join(f"`--clip-{name.replace('_', '-')}`" for name in given)
        raise Misuse(f"{flags} do not go together", "choose one way of clipping")
    return given or None


def _summarise(made: Model, path: Path) -> None:
    """What was made of the model, in a few lines, and what to do next."""
    step = made.steps[-1]
    trained, fed = [made.initializer(name) for name in step.differentiated()], [*made.inputs, *step.algorithm.inputs]
    selection = step.fact("train.selection") or {}
    others = {role: sum(map(len, by_reason.values())) for role, by_reason in selection.items() if role != "parameter"}
    losses = [_named(fact, fact["options"]) + f" of {fact['output']}" for fact in step.fact("train.loss") or ()]
    optimizers = [_named(fact, fact["hyper"]) for fact in step.fact("train.optimizer") or ()]
    schedules = [
        _named(fact, {k: v for k, v in fact.items() if k != "name"}) for fact in step.fact("train.lr_scheduler") or ()
    ]
    numbers = sum(math.prod(value.shape.numpy()) for value in trained if value.shape is not None)
    rows = [
        ["trains", f"{numbers:,} numbers in {len(trained)} tensors" + "".join(f", {n} {r}" for r, n in others.items())],
        ["loss", " + ".join(losses)],
        ["optimizer", "; ".join(optimizers)],
        *([["schedule", ", then ".join(schedules)]] if schedules else []),
        ["feed", ", ".join(f"{value.name} {value.type} {value.shape}" for value in fed)],
        ["wrote", f"{path} ({size(path.stat().st_size)})"],
        ["next", f"onward show {path}"],
        ["", f"onward check {path}"],
    ]
    print_rows(rows, styles=("bold",))
