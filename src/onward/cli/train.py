"""`onward train`: the main job."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from onward.cli import INTERRUPTED, options
from onward.cli.app import BUILD, Misuse, command
from onward.cli.console import print_json, print_rows, remark, say
from onward.cli.files import Target, target
from onward.cli.options import option, options_from, select_given, source_of
from onward.options import TrainOptions, options_of

if TYPE_CHECKING:
    from onward.training.cross_validation import CrossValidation
    from onward.training.run import Run

_RUN = "The run"
_SEVERAL = "Several processes"
_FOLDS = "each fold is a run of its own"
_WHEN_RESUMING = {"data", "validation", "epochs", "engine", "device", "mesh", "strategy", "deepspeed_config"}


@command(
    BUILD,
    "onward train digits.onnx --data digits.npz --loss cross_entropy --optimizer adam:lr=1e-3 --epochs 5 \\\n"
    "      -o digits-trained.onnx",
    "onward train net.onnx --data train.parquet --validation 0.1 --loss ce --schedule cosine:steps=2000 --patience 3",
    "onward train net.onnx --data patients.csv --loss ce --sample-weight weight --folds 5 --epochs 20",
    "onward train net.onnx --data photos/ --loss ce --freeze 'backbone.*' --column image=pixels",
    "onward train net.onnx --data photos.npz --loss ce --preprocess 'resize:size=32 scale channels_first' \\\n"
    "      --augment 'flip crop:padding=4'",
    "onward train net.onnx --data reviews.csv --loss ce --preprocess tokenize:words,vocabulary=10000,length=64",
    "onward train net.onnx --data photos/ --loss ce --engine torch --device cuda --precision bfloat16",
    "onward train net.onnx --data photos/ --loss ce --engine jax --mesh data=4,model=2",
    "onward train net.onnx --data tokens/ --loss ce --engine torch --strategy tensor --nproc 2",
    "onward train net.onnx --checkpoint checkpoint-500/ --data photos/ --loss ce --epochs 3",
    "onward train training.onnx --data digits.npz --reset --seed 7",
    "onward train gan.onnx --data digits.npz --noise z=normal --steps discriminator:2,generator --epochs 20",
    "onward train --config run.yaml --epochs 10",
    "onward train --resume runs/digits-20260101-120000",
    usage="MODEL --data DATA [OPTIONS]",
    **options_from(TrainOptions),
)
def train(
    model: options.OptionalModel = None,
    *,
    config: Annotated[
        Path | None,
        option(
            "--config",
            "FILE",
            "Options from a .yaml or .toml file, such as `config.yaml` in the folder of a run. Those given here count.",
            _RUN,
        ),
    ] = None,
    resume: Annotated[
        Path | None, option("--resume", "FOLDER", "Go on with a run, as if nothing had happened.", _RUN)
    ] = None,
    data_changed: Annotated[
        bool,
        option("--data-changed", None, "With `--resume`: accept data that are not those the run began with.", _RUN),
    ] = False,
    find_lr: Annotated[
        bool, option("--find-lr", None, "Do not train: search for a learning rate, and print it.", _RUN)
    ] = False,
    processes: Annotated[
        int | None,
        option("--nproc", "N", "Train in N processes on this machine, which torchrun starts.", _SEVERAL, min=1),
    ] = None,
    launcher: Annotated[
        str | None,
        option(
            "--launch", "HOW", "`ray`: train in workers that Ray Train starts, on all machines that Ray has.", _SEVERAL
        ),
    ] = None,
    workers: Annotated[
        int | None, option("--workers", "N", "How many workers of Ray there are.", _SEVERAL, min=1)
    ] = None,
    restarts: Annotated[
        int,
        option(
            "--restarts",
            "N",
            "After a failure of one of them, go on from the last save, up to N times.",
            _SEVERAL,
            min=0,
        ),
    ] = 0,
    quiet: Annotated[bool, option("--quiet -q", None, "Show no progress.", _RUN)] = False,
    output: options.Output = None,
    force: options.Force = False,
    as_json: options.Json = False,
    **given: Any,
) -> None:
    """Train a model on data, on stock ONNX Runtime or another engine.

    The model is a training model, or any model and a loss. Everything about the run is kept in a folder: Ctrl-C saves
    and stops, and `--resume` goes on. The best model is written to `-o`, its graph as it was, its weights trained.
    """
    if processes is not None or launcher is not None or workers is not None:
        _launch(processes, launcher, workers, restarts, given, resume)
    asked = select_given(TrainOptions, given)
    if "data" in asked:
        asked["data"] = source_of(given["data"])
    quiet = quiet or as_json
    if resume is not None:
        others = {"model": model, "config": config, "find-lr": find_lr}
        useless = [*(name for name, value in others.items() if value), *(asked.keys() - _WHEN_RESUMING)]
        _refuse(useless, "--resume", "it goes on as it was started")
        _resume(resume, asked | ({"data_changed": True} if data_changed else {}), output, force, quiet, as_json)
        return
    if data_changed:
        raise Misuse("`--data-changed` has no effect without `--resume`", "leave it out")
    if config is not None:
        from onward.training.config import read_settings

        asked = read_settings(config) | asked
    asked.update({"model": str(model)} if model is not None else {})
    path = asked.get("model")
    if path is None or "data" not in asked:
        missing = "argument `MODEL`" if path is None else "option `--data`"
        raise Misuse(
            f"missing {missing}", "see `onward train --help`; to go on with a run: `onward train --resume RUN`"
        )
    if "folds" in asked and "fold" not in asked:
        _refuse([name for name, value in {"find-lr": find_lr, "output": output}.items() if value], "--folds", _FOLDS)
        from onward.training.cross_validation import cross_validate

        _show_folds(cross_validate(**asked, quiet=quiet), as_json)
        return
    place = _place(Path(path), output, force, "checkpoint" in asked) if output is not None else None
    if find_lr and place is not None:
        raise Misuse("`--find-lr` trains nothing, so there is nothing to write", "leave `-o` out")
    from onward.training import api

    if find_lr:
        _refuse(asked.keys() & {"checkpoint"}, "--find-lr", "a checkpoint has its rate")
        taken = inspect.signature(api.find_lr).parameters.keys() - {"updates"}
        found = api.find_lr(**{name: value for name, value in asked.items() if name in taken})
        if as_json:
            print_json({"lr": found.suggested, "rates": found.rates, "losses": found.losses})
        else:
            say(f"lr={found.suggested:.2g}")
    else:
        _finish(api.train(**asked, quiet=quiet), place, as_json)


def _launch(
    processes: int | None,
    launcher: str | None,
    workers: int | None,
    restarts: int,
    given: dict[str, Any],
    resume: Path | None,
) -> NoReturn:
    """Start this command in several processes, each of which finds itself among others."""
    arguments = sys.argv[1:]
    for flag in ("--nproc", "--launch", "--workers", "--restarts"):
        arguments = _without(arguments, flag)
    if restarts and given.get("run") is None and "--resume" not in arguments:
        raise Misuse("`--restarts` needs to know where the run is", "name its folder: `--run FOLDER`")
    folder = resume or given.get("run")
    run = None if folder is None else Path(folder)
    if launcher is None and processes is not None and workers is None:
        from onward.distribute import torchrun

        raise SystemExit(torchrun.launch(arguments, processes, restarts, run))
    if launcher != "ray" or workers is None or processes is not None:
        raise Misuse(
            "what starts processes, and how many, do not fit together",
            "`--nproc 4` for torchrun on this machine, or `--launch ray --workers 4`",
        )
    if given.get("engine") == "jax":
        raise Misuse("Ray starts processes that PyTorch connects, and JAX connects its own", "leave out `--launch ray`")
    from onward.distribute import ray

    device = given.get("device") or "cpu"
    raise SystemExit(
        ray.launch(arguments, workers, None if run is None else str(run), restarts=restarts, device=device)
    )


def _without(arguments: list[str], flag: str) -> list[str]:
    """The arguments of the command without an option and its value."""
    if flag not in arguments:
        return [one for one in arguments if not one.startswith(f"{flag}=")]
    at = arguments.index(flag)
    return arguments[:at] + arguments[at + 2 :]


def _refuse(useless: Iterable[str], what: str, hint: str) -> None:
    flags = {one.name: one.flags[0] for one in options_of(TrainOptions)}
    for name in useless:
        flag = "a model" if name == "model" else f"`{flags.get(name, f'--{name}')}`"
        raise Misuse(f"{flag} has no effect with {what}", hint)


def _place(model: Path, output: Path, force: bool, continues: bool) -> Target:
    """Where the result goes. Its tensors are where the model has them, wherever a checkpoint has others."""
    from onward.model.storage import data_files_of

    inside = continues and model.is_file() and not data_files_of(model)
    return target(model, output, "trained", data="none" if inside else "auto", force=force)


def _resume(run: Path, asked: dict[str, Any], output: Path | None, force: bool, quiet: bool, as_json: bool) -> None:
    from onward.training.api import resume
    from onward.training.cross_validation import CrossValidation
    from onward.training.run import Run

    if (folds := CrossValidation(run)).is_there:
        _refuse(
            [*asked.keys() - {"data", "data_changed"}, *(["output"] if output is not None else [])], "--folds", _FOLDS
        )
        _show_folds(folds.go_on(**asked, quiet=quiet), as_json)
        return
    folder, place = Run(run), None
    if output is not None:
        place = target(Path(folder.read_config().get("model", "model.onnx")), output, "trained", force=force)
    _finish(resume(folder, **asked, quiet=quiet), place, as_json)


def _finish(run: Run, place: Target | None, as_json: bool) -> None:
    """Write the best model and say what came out; of several processes, the first does."""
    from onward.engines.distributed import current_group

    end = run.read_log()[-1]
    interrupted = end.get("reason") == "interrupted"
    if not current_group().is_first:
        raise SystemExit(INTERRUPTED if interrupted else 0)
    if place is not None and not interrupted:
        place.save(run.load_best())
    if as_json:
        output = str(place.path) if place is not None and not interrupted else None
        print_json({"run": str(run.path), "output": output, **end, "validation": run.read_results()})
    else:
        steps = f"{end['step']:,} step{'' if end['step'] == 1 else 's'}"
        remark(f"{end['reason'].replace('_', ' ')} after {steps}: {run.path}")
        if interrupted:
            remark(f"to go on: onward train --resume {run.path}")
        elif place is not None:
            remark(f"wrote {place.describe()}")
        remark(f"to look at it: onward report {run.path}")
    if interrupted:
        raise SystemExit(INTERRUPTED)


def _show_folds(found: CrossValidation, as_json: bool) -> None:
    if as_json:
        print_json(found.to_json())
    else:
        print_rows(found.rows(), styles=("bold",))
        remark(f"{'done' if found.is_finished else 'interrupted'}: {found.path}")
    if not found.is_finished:
        remark(f"to go on: onward train --resume {found.path}")
        raise SystemExit(INTERRUPTED)
