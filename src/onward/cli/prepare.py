"""`onward prepare`: from a model to a training model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from onward.cli import options
from onward.cli.app import BUILD, command
from onward.cli.arguments import specs_by_pattern
from onward.cli.catalogue import Catalogue, print_catalogue
from onward.cli.console import print_json
from onward.cli.failure import Misuse
from onward.cli.prepared import print_prepared
from onward.cli.saving import target
from onward.cli.work import working

_Texts = list[str] | None


def _option(panel: str, flag: str, metavar: str | None, help: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel=panel)


def _trains(flag: str, metavar: str | None, help: str) -> Any:
    return _option("What is trained", flag, metavar, help)


def _how(flag: str, metavar: str | None, help: str) -> Any:
    return _option("How it is trained", flag, metavar, help)


def _starts(flag: str, metavar: str | None, help: str) -> Any:
    return _option("Where it starts", flag, metavar, help)


@command(
    BUILD,
    "onward prepare digits.onnx --loss cross_entropy",
    "onward prepare net.onnx --loss ce --optimizer adamw:lr=1e-3,weight_decay=0.01 \\\n"
    "      --schedule cosine:steps=1000,warmup=50 --freeze 'backbone.*' --clip-norm 1 -o training.onnx",
    "onward prepare net.onnx --loss logits=ce --loss box=huber:scale=0.5 --group '*.bias:weight_decay=0'",
    "onward prepare --list optimizers",
    usage="MODEL --loss SPEC [OPTIONS]",
)
def prepare(
    model: options.OptionalModel = None,
    loss: Annotated[
        _Texts,
        _how(
            "--loss",
            "SPEC",
            "What to minimise: a loss by name; `OUTPUT=SPEC` where the model has several outputs; a loss as an .onnx "
            "file; or `value:NAME` for one that the model computes. Several are added up.",
        ),
    ] = None,
    optimizer: Annotated[str, _how("--optimizer", "SPEC", "By name; `adamw` unless given.")] = "adamw",
    schedule: Annotated[
        _Texts,
        _how(
            "--schedule",
            "SPEC",
            "How the learning rate changes. Several follow one another, each but the last with `until=STEP`.",
        ),
    ] = None,
    clip_norm: Annotated[float | None, _how("--clip-norm", "X", "Limit the norm of all gradients together.")] = None,
    clip_tensor_norm: Annotated[
        float | None, _how("--clip-tensor-norm", "X", "Limit the norm of each gradient.")
    ] = None,
    clip_value: Annotated[float | None, _how("--clip-value", "X", "Limit each element of gradients.")] = None,
    accumulate: Annotated[int, _how("--accumulate", "N", "Make one update from N batches.")] = 1,
    ema: Annotated[float | None, _how("--ema", "DECAY", "Keep a moving average of parameters.")] = None,
    loss_scale: Annotated[
        str | None, _how("--loss-scale", "X", "Scale the loss, for float16: a number, or `dynamic`.")
    ] = None,
    no_master_weights: Annotated[
        bool, _how("--no-master-weights", None, "Keep no float32 copies of parameters in float16 and bfloat16.")
    ] = False,
    variance: Annotated[
        Literal["population", "sample"],
        _how(
            "--variance", "KIND", "Running variance of BatchNormalization: `population` (ONNX) or `sample` (PyTorch)."
        ),
    ] = "population",
    trainable: Annotated[_Texts, _trains("--trainable", "PATTERN", "Train these alone. May be repeated.")] = None,
    freeze: Annotated[_Texts, _trains("--freeze", "PATTERN", "Do not train these. May be repeated.")] = None,
    group: Annotated[
        _Texts,
        _trains(
            "--group",
            "PATTERN:...",
            "Settings of the optimizer for some parameters, such as '*.bias:weight_decay=0'. May be repeated.",
        ),
    ] = None,
    append: Annotated[bool, _trains("--append", None, "Add a step to those that the model has.")] = False,
    init: Annotated[
        _Texts,
        _starts(
            "--init",
            "SPEC",
            "What a reset makes of parameters: an initializer by name, or `PATTERN=SPEC` for some; the values in the "
            "file unless given. May be repeated.",
        ),
    ] = None,
    seed: Annotated[int, _starts("--seed", "N", "For initial values, and for random numbers in training.")] = 0,
    listed: Annotated[
        Catalogue | None,
        typer.Option(
            "--list",
            metavar="WHAT",
            help="List `losses`, `optimizers`, `schedules` or `initializers` with options and defaults, and exit.",
        ),
    ] = None,
    output: options.Output = None,
    data: options.Data = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
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
    if model is None or not loss:
        missing = "argument `MODEL`" if model is None else "option `--loss`"
        raise Misuse(f"missing {missing}", "see `onward prepare --help`, or `onward prepare --list losses`")
    place = target(model, output, "training", data=data, force=force)
    recipe: dict[str, Any] = {
        "loss": _one_or_all(loss),
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

    with working(f"preparing {model}", model):
        made = onward.prepare(str(model), **recipe)
    place.save(made)
    summary = onward.describe(made)
    if as_json:
        print_json({"output": str(place.path), "model": summary.to_json()})
    else:
        print_prepared(summary, place)


def _one_or_all(given: list[str] | None) -> str | list[str] | None:
    return given[0] if given and len(given) == 1 else given or None


def _clip(**limits: float | None) -> dict[str, float] | None:
    given = {name: limit for name, limit in limits.items() if limit is not None}
    if len(given) > 1:
        flags = " and ".join(f"`--clip-{name.replace('_', '-')}`" for name in given)
        raise Misuse(f"{flags} do not go together", "choose one way of clipping")
    return given or None
