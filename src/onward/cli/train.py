"""`onward train`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from onward.cli import options, recipes
from onward.cli.app import BUILD, command
from onward.cli.console import print_json, remark
from onward.cli.failure import Misuse
from onward.cli.saving import target

if TYPE_CHECKING:
    from onward.train.folder import Run

_INTERRUPTED = 130


def _option(panel: str, *flags: str, metavar: str | None, help: str) -> Any:
    return typer.Option(*flags, metavar=metavar, help=help, rich_help_panel=panel)


def _data(*flags: str, metavar: str | None, help: str) -> Any:
    return _option("Data", *flags, metavar=metavar, help=help)


def _runs(*flags: str, metavar: str | None, help: str) -> Any:
    return _option("The run", *flags, metavar=metavar, help=help)


@command(
    BUILD,
    "onward train digits.onnx --data digits.npz --loss cross_entropy --optimizer adam:lr=1e-3 --epochs 5 \\\n"
    "      -o digits-trained.onnx",
    "onward train net.onnx --data train.parquet --validation 0.1 --loss ce --schedule cosine:steps=2000 --patience 3",
    "onward train net.onnx --data photos/ --loss ce --freeze 'backbone.*' --map image=pixels",
    "onward train --resume runs/digits-20260101-120000",
    usage="MODEL --data DATA [OPTIONS]",
)
def train(
    model: options.OptionalModel = None,
    data: Annotated[
        list[str] | None,
        _data(
            "--data",
            metavar="DATA",
            help="A .npz, .csv, .parquet, .arrow or .safetensors file, a folder of images or of a data set of Hugging "
            "Face, or `NAME=FILE.npy` for each column. May be repeated.",
        ),
    ] = None,
    validation: Annotated[
        str | None, _data("--validation", metavar="DATA", help="More data, or a share of it to keep apart: 0.1.")
    ] = None,
    mapping: Annotated[
        list[str] | None,
        _data("--map", metavar="INPUT=COLUMN", help="Which column an input takes, where names do not say it."),
    ] = None,
    batch_size: Annotated[int, _data("--batch-size", "-b", metavar="N", help="Samples in a batch.")] = 32,
    last: Annotated[
        Literal["keep", "drop", "pad"],
        _data("--last", metavar="HOW", help="A last batch that is not full: keep, drop or pad."),
    ] = "keep",
    no_shuffle: Annotated[bool, _data("--no-shuffle", metavar=None, help="Take samples in their order.")] = False,
    loss: recipes.Losses = None,
    optimizer: recipes.Optimizer = "adamw",
    schedule: recipes.Schedules = None,
    clip_norm: recipes.ClipNorm = None,
    clip_tensor_norm: recipes.ClipTensorNorm = None,
    clip_value: recipes.ClipValue = None,
    accumulate: recipes.Accumulate = 1,
    ema: recipes.Ema = None,
    loss_scale: recipes.LossScale = None,
    no_master_weights: recipes.NoMasterWeights = False,
    variance: recipes.Variance = "population",
    trainable: recipes.Trainable = None,
    freeze: recipes.Freeze = None,
    group: recipes.Groups = None,
    init: recipes.Init = None,
    seed: recipes.Seed = 0,
    epochs: Annotated[
        int | None, _runs("--epochs", "-e", metavar="N", help="Times through the data; 1 unless given.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        _runs(
            "--metric",
            metavar="SPEC",
            help="Measured on validation data: `accuracy`, `top_k:k=5`, `f1` ... May be repeated.",
        ),
    ] = None,
    monitor: Annotated[
        str | None, _runs("--monitor", metavar="METRIC", help="What decides which model is the best.")
    ] = None,
    patience: Annotated[
        int | None, _runs("--patience", metavar="N", help="Stop after N epochs without a better model.")
    ] = None,
    run: Annotated[
        Path | None, _runs("--run", metavar="FOLDER", help="The folder of the run; new below runs/ unless given.")
    ] = None,
    resume: Annotated[
        Path | None, _runs("--resume", metavar="FOLDER", help="Go on with a run, as if nothing had happened.")
    ] = None,
    save_every: Annotated[
        float, _runs("--save-every", metavar="SECONDS", help="How often to save within an epoch.")
    ] = 60.0,
    tensorboard: Annotated[bool, _runs("--tensorboard", metavar=None, help="Write event files, too.")] = False,
    device: Annotated[str, _runs("--device", metavar="NAME", help="`cpu`, `cuda`, `directml`, `coreml` ...")] = "cpu",
    threads: Annotated[int | None, _runs("--threads", metavar="N", help="Threads of ONNX Runtime.")] = None,
    recompute: Annotated[
        int | None,
        _runs(
            "--recompute",
            metavar="N",
            help="Save memory: keep the results of every N-th layer, compute the rest again.",
        ),
    ] = None,
    quiet: Annotated[bool, _runs("--quiet", "-q", metavar=None, help="Show no progress.")] = False,
    output: options.Output = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Train a model on data, on stock ONNX Runtime.

    The model is a training model, or any model and a loss. Everything about the run is kept in a folder: Ctrl-C saves
    and stops, and `--resume` goes on. The best model is written to `-o`, its graph as it was, its weights trained.
    """
    if resume is not None:
        _resume(resume, epochs, output, quiet, as_json, force)
        return
    if model is None or not data:
        missing = "argument `MODEL`" if model is None else "option `--data`"
        raise Misuse(
            f"missing {missing}", "see `onward train --help`; to go on with a run: `onward train --resume RUN`"
        )
    place = target(model, output, "trained", force=force) if output is not None else None
    recipe = recipes.recipe(
        loss=loss,
        optimizer=optimizer,
        schedule=schedule,
        clip_norm=clip_norm,
        clip_tensor_norm=clip_tensor_norm,
        clip_value=clip_value,
        accumulate=accumulate,
        ema=ema,
        loss_scale=loss_scale,
        no_master_weights=no_master_weights,
        variance=variance,
        trainable=trainable,
        freeze=freeze,
        group=group,
        init=init,
    )
    import onward
    from onward.train.api import train as start

    source = onward.read(str(model))
    if source.is_training_model and not loss:
        recipe = {}
    made = start(
        source,
        data[0] if len(data) == 1 and "=" not in Path(data[0]).name else data,
        epochs=1 if epochs is None else epochs,
        batch_size=batch_size,
        validation=_validation(validation),
        run=run,
        columns=_columns(mapping or []),
        shuffle=not no_shuffle,
        last=last,
        seed=seed,
        metrics=metric,
        monitor=monitor,
        patience=patience,
        save_every=save_every,
        tensorboard=tensorboard,
        device=device,
        threads=threads,
        recompute=recompute,
        quiet=quiet or as_json,
        **{name: value for name, value in recipe.items() if value is not None},
    )
    _finish(made, place.path if place else None, as_json)


def _resume(run: Path, epochs: int | None, output: Path | None, quiet: bool, as_json: bool, force: bool) -> None:
    from onward.train.api import resume
    from onward.train.folder import Run

    place = target(Path(Run(run).config["model"]), output, "trained", force=force) if output is not None else None
    _finish(resume(run, epochs=epochs, quiet=quiet or as_json), place.path if place else None, as_json)


def _finish(run: Run, output: Path | None, as_json: bool) -> None:
    """Write the best model and say what came out."""
    events = run.log
    end = events[-1]
    interrupted = end.get("reason") == "interrupted"
    if output is not None and not interrupted:
        run.best.save(output)
    measured = [event for event in events if event["event"] == "validation"]
    results = {k: v for k, v in measured[-1].items() if k not in ("event", "step", "epoch")} if measured else {}
    if as_json:
        print_json({"run": str(run.path), "output": str(output) if output else None, **end, "validation": results})
    else:
        remark(f"{end['reason'].replace('_', ' ')} after {end['step']} steps: {run.path}")
        if interrupted:
            remark(f"to go on: onward train --resume {run.path}")
        elif output is not None:
            remark(f"wrote {output}")
        remark(f"to look at it: onward report {run.path}")
    if interrupted:
        raise typer.Exit(_INTERRUPTED)


def _validation(given: str | None) -> Any:
    if given is None:
        return None
    try:
        share = float(given)
    except ValueError:
        return given
    if not 0 < share < 1:
        raise Misuse(f"`--validation {given}` is no share of the data", "give a number between 0 and 1, or more data")
    return share


def _columns(given: list[str]) -> dict[str, str]:
    wrong = [text for text in given if "=" not in text]
    if wrong:
        raise Misuse(f"`--map {wrong[0]}` is not INPUT=COLUMN", "for example `--map image=pixels`")
    return dict(text.split("=", 1) for text in given)
