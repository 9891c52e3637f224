"""`onward train`: the main job."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from onward.cli import INTERRUPTED, options, recipes
from onward.cli.app import BUILD, Misuse, command
from onward.cli.console import print_json, remark, say
from onward.cli.files import Target, target, working
from onward.cli.options import names_in, pairs, recomputation

if TYPE_CHECKING:
    from onward import Model
    from onward.training.folder import Run
    from onward.training.lr_finder import Rates


def _option(panel: str, *flags: str, metavar: str | None, help: str) -> Any:
    return typer.Option(*flags, metavar=metavar, help=help, rich_help_panel=panel)


def _data(*flags: str, metavar: str | None, help: str) -> Any:
    return _option("Data", *flags, metavar=metavar, help=help)


def _runs(*flags: str, metavar: str | None, help: str) -> Any:
    return _option("The run", *flags, metavar=metavar, help=help)


def _engines(*flags: str, metavar: str | None, help: str) -> Any:
    return _option("The engine", *flags, metavar=metavar, help=help)


@command(
    BUILD,
    "onward train digits.onnx --data digits.npz --loss cross_entropy --optimizer adam:lr=1e-3 --epochs 5 \\\n"
    "      -o digits-trained.onnx",
    "onward train net.onnx --data train.parquet --validation 0.1 --loss ce --schedule cosine:steps=2000 --patience 3",
    "onward train net.onnx --data photos/ --loss ce --freeze 'backbone.*' --map image=pixels",
    "onward train net.onnx --data photos.npz --loss ce --preprocess 'resize:size=32 scale channels_first' \\\n"
    "      --augment 'flip crop:padding=4'",
    "onward train net.onnx --data photos/ --loss ce --engine torch --device cuda --precision bfloat16",
    "onward train net.onnx --from checkpoint-500/ --data photos/ --loss ce --epochs 3",
    "onward train training.onnx --data digits.npz --reset --seed 7",
    "onward train gan.onnx --data digits.npz --noise z=normal --steps discriminator:2,generator --epochs 20",
    "onward train --resume runs/digits-20260101-120000",
    usage="MODEL --data DATA [OPTIONS]",
)
def train(
    context: typer.Context,
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
    stratify: Annotated[
        bool | None,
        _data(
            "--stratify/--no-stratify",
            metavar=None,
            help="Whether a share for validation has its part of every class; so it is where labels are classes.",
        ),
    ] = None,
    mapping: Annotated[
        list[str] | None,
        _data("--map", metavar="INPUT=COLUMN", help="Which column an input takes, where names do not say it."),
    ] = None,
    noise: Annotated[
        list[str] | None,
        _data(
            "--noise", metavar="INPUT=KIND", help="An input that is no data but random: `z=normal`, `z=uniform:low=-1`."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, _data("--batch-size", "-b", metavar="N", help="Samples in a batch; 32 unless given.")
    ] = None,
    last: Annotated[
        Literal["keep", "drop", "pad"],
        _data("--last", metavar="HOW", help="A last batch that is not full: keep, drop or pad."),
    ] = "keep",
    no_shuffle: Annotated[bool, _data("--no-shuffle", metavar=None, help="Take samples in their order.")] = False,
    preprocess: recipes.Preprocess = None,
    augment: recipes.Augment = None,
    keep_preprocessing: Annotated[
        bool,
        _option(
            "What happens to data",
            "--keep-preprocessing",
            metavar=None,
            help="The model that comes out takes data as they are, not what the model took.",
        ),
    ] = False,
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
    init: recipes.Init = None,
    seed: recipes.Seed = 0,
    epochs: Annotated[
        int | None, _runs("--epochs", "-e", metavar="N", help="Times through the data; 1 unless given.")
    ] = None,
    steps: Annotated[
        str | None,
        _runs(
            "--steps",
            metavar="STEPS",
            help="Of a model with several: which run, and how often in a round: `discriminator:2,generator`.",
        ),
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
    origin: Annotated[
        Path | None,
        _runs("--from", metavar="CHECKPOINT", help="Go on from a checkpoint of another framework, which is of MODEL."),
    ] = None,
    names: options.Names = None,
    reset: Annotated[
        bool,
        _runs(
            "--reset",
            metavar=None,
            help="Start from the initialization of a training model, and not from its state; `--seed` draws anew.",
        ),
    ] = False,
    resume: Annotated[
        Path | None, _runs("--resume", metavar="FOLDER", help="Go on with a run, as if nothing had happened.")
    ] = None,
    save_every: Annotated[
        float, _runs("--save-every", metavar="SECONDS", help="How often to save within an epoch.")
    ] = 60.0,
    tensorboard: Annotated[bool, _runs("--tensorboard", metavar=None, help="Write event files, too.")] = False,
    engine: Annotated[
        str, _engines("--engine", metavar="NAME", help="`onnxruntime`, `torch`, `jax`, `tensorflow`, `numpy`.")
    ] = "onnxruntime",
    device: Annotated[
        str, _engines("--device", metavar="NAME", help="`cpu`, `cuda`, `directml` ...: what `onward engines` lists.")
    ] = "cpu",
    threads: Annotated[int | None, _engines("--threads", metavar="N", help="Threads of the CPU.")] = None,
    precision: Annotated[
        str | None,
        _engines("--precision", metavar="TYPE", help="`bfloat16`, `float16` or `tf32`, where the engine has it."),
    ] = None,
    no_compile: Annotated[
        bool, _engines("--no-compile", metavar=None, help="Run operator by operator on torch, jax and tensorflow.")
    ] = False,
    deterministic: Annotated[
        bool, _engines("--deterministic", metavar=None, help="Same numbers in every run, where the engine has it.")
    ] = False,
    recompute: options.Recompute = None,
    find_lr: Annotated[
        bool, _runs("--find-lr", metavar=None, help="Do not train: search for a learning rate, and print it.")
    ] = False,
    quiet: Annotated[bool, _runs("--quiet", "-q", metavar=None, help="Show no progress.")] = False,
    output: options.Output = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Train a model on data, on stock ONNX Runtime or another engine.

    The model is a training model, or any model and a loss. Everything about the run is kept in a folder: Ctrl-C saves
    and stops, and `--resume` goes on. The best model is written to `-o`, its graph as it was, its weights trained.
    """
    given = {name for name in context.params if _is_stated(context, name)}
    if resume is not None:
        _refuse_with("--resume", given - _WHEN_RESUMING, "it goes on as it was started")
        _resume(context, resume)
        return
    if model is None or not data:
        missing = "argument `MODEL`" if model is None else "option `--data`"
        raise Misuse(
            f"missing {missing}", "see `onward train --help`; to go on with a run: `onward train --resume RUN`"
        )
    place = _place(model, output, force, origin) if output is not None else None
    recipe = recipes.chosen(context)
    import onward
    from onward.training import api

    if origin is not None:
        stated = {name: recipe[name] if name in given else None for name in _FROM}
        _refuse_with("`--from`", given & (recipes.OPTIONS | {"reset"}) - _FROM, "a checkpoint says how it goes on")
        source, recipe = _continued(origin, model, names, stated), {}
    else:
        _refuse_with("a model alone", given & {"names"}, "it is for `--from CHECKPOINT`")
        source = onward.load(str(model))
    if origin is None and source.is_training_model:
        _refuse_with("a model that carries its training", given & recipes.OPTIONS, "strip it first (`onward strip`)")
        recipe = {}
    common: dict[str, Any] = {
        "batch_size": batch_size,
        "columns": pairs(mapping or [], "--map image=pixels"),
        **({"seed": seed} if "seed" in given else {}),
        "engine": engine,
        "device": device,
        "threads": threads,
        **{name: value for name, value in recipe.items() if value is not None},
    }
    if find_lr and place is not None:
        raise Misuse("`--find-lr` trains nothing, so there is nothing to write", "leave `-o` out")
    if find_lr:
        _show_rate(api.find_lr(source, _source(data), **common), as_json)
        return
    made = api.train(
        source,
        _source(data),
        epochs=1 if epochs is None else epochs,
        validation=_validation(validation),
        stratify=stratify,
        keep_preprocessing=keep_preprocessing,
        run=run,
        shuffle=not no_shuffle,
        last=last,
        reset=reset,
        metrics=metric,
        monitor=monitor,
        patience=patience,
        save_every=save_every,
        tensorboard=tensorboard,
        recompute=recomputation(recompute),
        compile=not no_compile,
        precision=precision,
        deterministic=deterministic,
        steps=steps,
        noise=pairs(noise or [], "--noise z=normal"),
        quiet=quiet or as_json,
        **common,
    )
    _finish(made, place, as_json)


_FROM = frozenset({"loss", "optimizer", "schedule"})
"""Options of a recipe that say what a checkpoint does not."""


def _place(model: Path, output: Path, force: bool, origin: Path | None) -> Target:
    """Where the result goes. Its tensors are where the model has them, wherever a checkpoint has others."""
    from onward.model.storage import data_files_of

    inside = origin is not None and model.is_file() and not data_files_of(model)
    return target(model, output, "trained", data="none" if inside else "auto", force=force)


def _continued(origin: Path, model: Path, names: Path | None, stated: dict[str, Any]) -> Model:
    """The training model that goes on from a checkpoint."""
    from onward.checkpoint.importing import apply_plan, plan

    with working(f"reading {origin}"):
        planned = plan(origin, model, names=names_in(names) if names is not None else None, **stated)
        made = apply_plan(planned)
    for note in planned.notes:
        remark(note)
    return made


_WHEN_RESUMING = {
    "resume", "data", "validation", "epochs", "engine", "device", "output", "force", "quiet", "as_json",
}  # fmt: skip


def _is_stated(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _if_stated(context: typer.Context, name: str) -> Any:
    return context.params[name] if _is_stated(context, name) else None


def _refuse_with(what: str, options: Set[str], hint: str) -> None:
    if options:
        name = sorted(options)[0]
        flag = "a model" if name == "model" else f"`--{_FLAGS.get(name, name.replace('_', '-'))}`"
        raise Misuse(f"{flag} has no effect with {what}", hint)


_FLAGS = {"mapping": "map", "origin": "from"}


def _resume(context: typer.Context, run: Path) -> None:
    from onward.training.api import resume
    from onward.training.folder import Run

    given = context.params
    folder, output = Run(run), given["output"]
    place = target(Path(folder.config["model"]), output, "trained", force=given["force"]) if output else None
    made = resume(
        folder,
        _source(given["data"]) if given["data"] else None,
        validation=_validation(given["validation"]),
        epochs=given["epochs"],
        engine=_if_stated(context, "engine"),
        device=_if_stated(context, "device"),
        quiet=given["quiet"] or given["as_json"],
    )
    _finish(made, place, given["as_json"])


def _finish(run: Run, place: Target | None, as_json: bool) -> None:
    """Write the best model and say what came out."""
    end = run.log[-1]
    interrupted = end.get("reason") == "interrupted"
    if place is not None and not interrupted:
        place.save(run.best)
    if as_json:
        output = str(place.path) if place is not None and not interrupted else None
        print_json({"run": str(run.path), "output": output, **end, "validation": run.results})
    else:
        steps = f"{end['step']:,} step{'' if end['step'] == 1 else 's'}"
        remark(f"{end['reason'].replace('_', ' ')} after {steps}: {run.path}")
        if interrupted:
            remark(f"to go on: onward train --resume {run.path}")
        elif place is not None:
            remark(f"wrote {place.described()}")
        remark(f"to look at it: onward report {run.path}")
    if interrupted:
        raise SystemExit(INTERRUPTED)


def _show_rate(found: Rates, as_json: bool) -> None:
    if as_json:
        print_json({"lr": found.suggested, "rates": found.rates, "losses": found.losses})
    else:
        say(f"lr={found.suggested:.2g}")


def _source(data: list[str]) -> str | list[str]:
    """One file, or several; with a name for each, they are columns."""
    return data[0] if len(data) == 1 and "=" not in Path(data[0]).name else data


def _validation(given: str | None) -> Any:
    if given is None:
        return None
    try:
        share = float(given.removesuffix("%"))
    except ValueError:
        return given
    if given.endswith("%"):
        raise Misuse(f"`--validation {given}` is no share of the data", f"write `--validation {share / 100:g}`")
    if not 0 < share < 1:
        raise Misuse(f"`--validation {given}` is no share of the data", "give a number between 0 and 1, or more data")
    return share
