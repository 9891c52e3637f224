"""The options of a recipe, which several commands share."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal

import typer

from onward.cli.app import Misuse
from onward.cli.options import specs_by_pattern

_Texts = list[str] | None


def _option(panel: str, flag: str, metavar: str | None, help: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel=panel)


def _trains(flag: str, metavar: str | None, help: str) -> Any:
    return _option("What is trained", flag, metavar, help)


def _how(flag: str, metavar: str | None, help: str) -> Any:
    return _option("How it is trained", flag, metavar, help)


def _starts(flag: str, metavar: str | None, help: str) -> Any:
    return _option("Where it starts", flag, metavar, help)


def _first(flag: str, metavar: str | None, help: str) -> Any:
    return _option("What happens to data", flag, metavar, help)


Losses = Annotated[
    _Texts,
    _how(
        "--loss",
        "SPEC",
        "What to minimise: a loss by name; `OUTPUT=SPEC` where the model has several outputs; a loss as an .onnx "
        "file; or `value:NAME` for one that the model computes. Several are added up.",
    ),
]
Optimizer = Annotated[str, _how("--optimizer", "SPEC", "By name; `adamw` unless given.")]
Rate = Annotated[float | None, _how("--lr", "X", "The learning rate, where the optimizer does not say it.")]
Schedules = Annotated[
    _Texts,
    _how(
        "--schedule",
        "SPEC",
        "How the learning rate changes. Several follow one another, each but the last with `until=STEP`.",
    ),
]
ClipNorm = Annotated[float | None, _how("--clip-norm", "X", "Limit the norm of all gradients together.")]
ClipTensorNorm = Annotated[float | None, _how("--clip-tensor-norm", "X", "Limit the norm of each gradient.")]
ClipValue = Annotated[float | None, _how("--clip-value", "X", "Limit each element of gradients.")]
Accumulate = Annotated[int, _how("--accumulate", "N", "Make one update from N batches.")]
Ema = Annotated[float | None, _how("--ema", "DECAY", "Keep a moving average of parameters.")]
LossScale = Annotated[str | None, _how("--loss-scale", "X", "Scale the loss, for float16: a number, or `dynamic`.")]
NoMasterWeights = Annotated[
    bool, _how("--no-master-weights", None, "Keep no float32 copies of parameters in float16 and bfloat16.")
]
Variance = Annotated[
    Literal["population", "sample"],
    _how("--variance", "KIND", "Running variance of BatchNormalization: `population` (ONNX) or `sample` (PyTorch)."),
]
Teacher = Annotated[str | None, _how("--teacher", "MODEL", "A model to learn from, beside the loss or alone.")]
Distill = Annotated[
    _Texts,
    _how("--distill", "SPEC", "How to learn from the teacher, such as kl:temperature=4,weight=0.5. May be repeated."),
]
NewHead = Annotated[
    str | None,
    _trains("--new-head", "OPTIONS", "First give the model a new last layer: 5 classes, or 5,layer=fc."),
]
Lora = Annotated[
    str | None,
    _trains("--lora", "OPTIONS", "First add low-rank adapters, such as 8,targets='*attn*', and train them alone."),
]
Trainable = Annotated[
    _Texts,
    _trains("--trainable", "PATTERN", "Train these alone; also `biases`, `norms` or the `head`. May be repeated."),
]
Freeze = Annotated[_Texts, _trains("--freeze", "PATTERN", "Do not train these. May be repeated.")]
Groups = Annotated[
    _Texts,
    _trains(
        "--group",
        "PATTERN:...",
        "Settings of the optimizer for some parameters, such as '*.bias:weight_decay=0'. May be repeated.",
    ),
]
RateDecay = Annotated[
    float | None,
    _trains("--lr-decay", "X", "Give each block of the network X times the learning rate of the block after it."),
]
Init = Annotated[
    _Texts,
    _starts(
        "--init",
        "SPEC",
        "What `train` and `reset` make of parameters first: an initializer by name, or `PATTERN=SPEC` for some; the "
        "values in the file unless given. May be repeated.",
    ),
]
Preprocess = Annotated[
    _Texts,
    _first(
        "--preprocess",
        "SPECS",
        "What happens to data before the model, such as 'resize:size=32 scale channels_first', or an .onnx file that "
        "does it; 'INPUT=...' where several inputs take pictures. May be repeated.",
    ),
]
Augment = Annotated[
    _Texts,
    _first("--augment", "SPECS", "What happens to them in training alone, such as 'flip crop:padding=4'."),
]
Seed = Annotated[int, _starts("--seed", "N", "For initial values, and for random numbers in training.")]


def chosen(context: typer.Context) -> dict[str, Any]:
    """The arguments of `onward.prepare` that the options of a command stand for."""
    given: dict[str, Any] = {name: context.params[name] for name in OPTIONS}
    return _recipe(**given | {name: list(v) or None for name, v in given.items() if isinstance(v, list | tuple)})


def _recipe(
    *,
    loss: _Texts,
    optimizer: str,
    lr: float | None,
    schedule: _Texts,
    clip_norm: float | None,
    clip_tensor_norm: float | None,
    clip_value: float | None,
    accumulate: int,
    ema: float | None,
    loss_scale: str | None,
    no_master_weights: bool,
    variance: str,
    trainable: _Texts,
    freeze: _Texts,
    group: _Texts,
    lr_decay: float | None,
    init: _Texts,
    new_head: str | None = None,
    lora: str | None = None,
    teacher: str | None = None,
    distill: _Texts = None,
    preprocess: _Texts = None,
    augment: _Texts = None,
) -> dict[str, Any]:
    return {
        "loss": one_or_all(loss),
        "optimizer": optimizer,
        "lr": lr,
        "schedule": one_or_all(schedule),
        "trainable": trainable,
        "freeze": freeze or (),
        "groups": group or (),
        "lr_decay": lr_decay,
        "clip": _clip(norm=clip_norm, tensor_norm=clip_tensor_norm, value=clip_value),
        "accumulate": accumulate,
        "ema": ema,
        "loss_scale": loss_scale,
        "master_weights": False if no_master_weights else None,
        "init": specs_by_pattern(init or ()) or "file",
        "variance": variance,
        "new_head": new_head,
        "lora": lora,
        "teacher": teacher,
        "distill": one_or_all(distill),
        "preprocess": one_or_all(preprocess),
        "augment": one_or_all(augment),
    }


OPTIONS = frozenset(inspect.signature(_recipe).parameters)
"""The names of the options that make a recipe."""


def one_or_all(given: list[str] | None) -> str | list[str] | None:
    return given[0] if given and len(given) == 1 else given or None


def _clip(**limits: float | None) -> dict[str, float] | None:
    given = {name: limit for name, limit in limits.items() if limit is not None}
    if len(given) > 1:
        flags = " and ".join(f"`--clip-{name.replace('_', '-')}`" for name in given)
        raise Misuse(f"{flags} do not go together", "choose one way of clipping")
    return given or None
