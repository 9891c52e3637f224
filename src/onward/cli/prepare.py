"""`onward prepare`: from a model to a training model."""

from __future__ import annotations

from typing import Annotated

import typer

from onward.cli import options, recipes
from onward.cli.app import BUILD, Misuse, command
from onward.cli.catalogue import Catalogue, print_catalogue
from onward.cli.console import print_json
from onward.cli.files import target, working
from onward.cli.options import option
from onward.cli.prepared import print_prepared


@command(
    BUILD,
    "onward prepare digits.onnx --loss cross_entropy",
    "onward prepare net.onnx --loss ce --optimizer adamw:lr=1e-3,weight_decay=0.01 \\\n"
    "      --schedule cosine:steps=1000,warmup=50 --freeze 'backbone.*' --clip-norm 1 -o training.onnx",
    "onward prepare net.onnx --loss logits=ce --loss box=huber:scale=0.5 --group '*.bias:weight_decay=0'",
    "onward prepare net.onnx --loss ce --new-head classes=5 --lora 'rank=8,targets=*attn*'",
    "onward prepare gan.onnx --loss score=bce_with_logits:constant=1 --trainable 'maker.*' --append --name maker",
    "onward prepare --list optimizers",
    usage="MODEL --loss SPEC [OPTIONS]",
)
def prepare(
    context: typer.Context,
    model: options.OptionalModel = None,
    loss: recipes.Losses = None,
    optimizer: recipes.Optimizer = "adamw",
    lr: recipes.Rate = None,
    schedule: recipes.Schedules = None,
    clip_norm: recipes.ClipNorm = None,
    clip_tensor_norm: recipes.ClipTensorNorm = None,
    clip_value: recipes.ClipValue = None,
    accumulate: recipes.Accumulate = 1,
    ema: recipes.Ema = None,
    loss_scale: recipes.LossScale = None,
    no_master_weights: recipes.NoMasterWeights = False,
    variance: recipes.Variance = "population",
    teacher: recipes.Teacher = None,
    distill: recipes.Distill = None,
    new_head: recipes.NewHead = None,
    lora: recipes.Lora = None,
    trainable: recipes.Trainable = None,
    freeze: recipes.Freeze = None,
    group: recipes.Groups = None,
    lr_decay: recipes.RateDecay = None,
    append: Annotated[
        bool,
        option("--append", None, "Add a step to those that the model has.", "What is trained"),
    ] = False,
    name: Annotated[
        str | None,
        option("--name", "NAME", "What the step is called.", "What is trained"),
    ] = None,
    times: Annotated[
        int,
        option("--times", "N", "How often the step runs while others run once.", "What is trained"),
    ] = 1,
    preprocess: recipes.Preprocess = None,
    augment: recipes.Augment = None,
    init: recipes.Init = None,
    seed: recipes.Seed = 0,
    listed: Annotated[
        Catalogue | None,
        option(
            "--list",
            "WHAT",
            "List `losses`, `optimizers`, `schedules`, `initializers`, `preprocessing` or `augmentations` with "
            "options and defaults, and exit.",
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
    if model is None or not (loss or teacher):
        missing = "argument `MODEL`" if model is None else "option `--loss`"
        raise Misuse(f"missing {missing}", "see `onward prepare --help`, or `onward prepare --list losses`")
    place = target(model, output, "training", data=data, force=force)
    recipe = recipes.chosen(context)
    import onward

    with working(f"preparing {model}", model):
        made = onward.prepare(str(model), **recipe, seed=seed, append=append, name=name, times=times)
    place.save(made)
    summary = onward.describe(made)
    if as_json:
        print_json({"output": str(place.path), "model": summary.to_json()})
    else:
        print_prepared(summary, place)
