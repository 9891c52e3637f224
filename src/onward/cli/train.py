"""`onward train`: train a model, resume a run, cross-validate, search a learning rate."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from onward.cli import INTERRUPTED, options
from onward.cli.app import BUILD, Misuse, command
from onward.cli.console import print_json, print_rows, remark, say
from onward.cli.options import option, options_from, select_given, source_of
from onward.cli.output_files import OutputFile, target
from onward.options import TrainOptions, options_of

if TYPE_CHECKING:
    from onward.training.cross_validation import CrossValidation
    from onward.training.run import Run

_RUN = "Run"
_SEVERAL = "Several processes"
_FOLDS = "every fold is a separate run"
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
            "Options in a .yaml or .toml file, such as `config.yaml` of a run. Flags override it.",
            _RUN,
        ),
    ] = None,
    resume: Annotated[Path | None, option("--resume", "FOLDER", "Resume a run from its last save.", _RUN)] = None,
    data_changed: Annotated[
        bool,
        option("--data-changed", None, "With `--resume`: accept other data than those of the run.", _RUN),
    ] = False,
    find_lr: Annotated[
        bool, option("--find-lr", None, "Search for a learning rate and print it, instead of training.", _RUN)
    ] = False,
    processes: Annotated[
        int | None,
        option("--nproc", "N", "Train in N processes on this machine, started by torchrun.", _SEVERAL, min=1),
    ] = None,
    launcher: Annotated[
        str | None,
        option(
            "--launch", "HOW", "`ray`: train in workers of Ray Train, on all machines of the Ray cluster.", _SEVERAL
        ),
    ] = None,
    workers: Annotated[int | None, option("--workers", "N", "Number of Ray workers.", _SEVERAL, min=1)] = None,
    restarts: Annotated[
        int,
        option(
            "--restarts",
            "N",
            "Restart from the last save after a failure, at most N times.",
            _SEVERAL,
            min=0,
        ),
    ] = 0,
    quiet: Annotated[bool, option("--quiet -q", None, "Hide the progress.", _RUN)] = False,
    output: options.Output = None,
    force: options.Force = False,
    as_json: options.Json = False,
    **typed: Any,
) -> None:
    """Train a model on data, with ONNX Runtime or another engine.

    The model is a training model, or any model with `--loss`. The run is saved in a folder: Ctrl-C
    saves and stops, `--resume` continues. `-o` writes the best model: the original graph with
    trained weights.
    """
    if processes is not None or launcher is not None or workers is not None:
        _launch(processes, launcher, workers, restarts, typed, resume)
    asked = select_given(TrainOptions, typed)
    if "data" in asked:
        asked["data"] = source_of(typed["data"])
    quiet = quiet or as_json
    if resume is not None:
        others = {"model": model, "config": config, "find-lr": find_lr}
        useless = [*(name for name, value in others.items() if value), *(asked.keys() - _WHEN_RESUMING)]
        _refuse(useless, "--resume", "a resumed run keeps its options")
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
        raise Misuse(f"missing {missing}", "see `onward train --help`; to resume a run: `onward train --resume RUN`")
    if "folds" in asked and "fold" not in asked:
        _refuse([name for name, value in {"find-lr": find_lr, "output": output}.items() if value], "--folds", _FOLDS)
        from onward.training.cross_validation import cross_validate

        _show_folds(cross_validate(**asked, quiet=quiet), as_json)
        return
    destination = _destination(Path(path), output, force, "checkpoint" in asked) if output is not None else None
    if find_lr and destination is not None:
        raise Misuse("`-o` has no effect with `--find-lr`, which does not train", "leave `-o` out")
    from onward.training import api

    if find_lr:
        _refuse(asked.keys() & {"checkpoint"}, "--find-lr", "the checkpoint stores its learning rate")
        accepted = inspect.signature(api.find_lr).parameters.keys() - {"updates"}
        rates = api.find_lr(**{name: value for name, value in asked.items() if name in accepted})
        if as_json:
            print_json({"lr": rates.suggested, "rates": rates.rates, "losses": rates.losses})
        else:
            say(f"lr={rates.suggested:.2g}")
    else:
        _finish(api.train(**asked, quiet=quiet), destination, as_json)


def _launch(
    processes: int | None,
    launcher: str | None,
    workers: int | None,
    restarts: int,
    typed: dict[str, Any],
    resume: Path | None,
) -> NoReturn:
    """Run this command in several processes, and exit."""
    arguments = sys.argv[1:]
    for flag in ("--nproc", "--launch", "--workers", "--restarts"):
        arguments = _without(arguments, flag)
    if restarts and typed.get("run") is None and "--resume" not in arguments:
        raise Misuse("`--restarts` needs the run folder", "name it: `--run FOLDER`")
    folder = resume or typed.get("run")
    run = None if folder is None else Path(folder)
    if launcher is None and processes is not None and workers is None:
        from onward.distribute import torchrun

        raise SystemExit(torchrun.launch(arguments, processes, restarts, run))
    if launcher != "ray" or workers is None or processes is not None:
        raise Misuse(
            "use either `--nproc` or `--launch ray` with `--workers`",
            "`--nproc 4` for torchrun on this machine, or `--launch ray --workers 4`",
        )
    if typed.get("engine") == "jax":
        raise Misuse("`--launch ray` does not run `--engine jax`: JAX connects processes itself", "leave it out")
    from onward.distribute import ray

    device = typed.get("device") or "cpu"
    raise SystemExit(
        ray.launch(arguments, workers, None if run is None else str(run), restarts=restarts, device=device)
    )


def _without(arguments: list[str], flag: str) -> list[str]:
    """Return the arguments of the command without an option and its value."""
    if flag not in arguments:
        return [argument for argument in arguments if not argument.startswith(f"{flag}=")]
    at = arguments.index(flag)
    return arguments[:at] + arguments[at + 2 :]


def _refuse(useless: Iterable[str], option: str, hint: str) -> None:
    flags = {declared.name: declared.flags[0] for declared in options_of(TrainOptions)}
    for name in useless:
        flag = "a model" if name == "model" else f"`{flags.get(name, f'--{name}')}`"
        raise Misuse(f"{flag} has no effect with {option}", hint)


def _destination(model: Path, output: Path, force: bool, continues: bool) -> OutputFile:
    """Return the output file, with the model's storage of tensors, not the checkpoint's."""
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
    folder, destination = Run(run), None
    if output is not None:
        destination = target(Path(folder.read_config().get("model", "model.onnx")), output, "trained", force=force)
    _finish(resume(folder, **asked, quiet=quiet), destination, as_json)


def _finish(run: Run, destination: OutputFile | None, as_json: bool) -> None:
    """Write the best model and print the result, in the first process."""
    from onward.engines.distributed import current_group

    end = run.read_log()[-1]
    interrupted = end.get("reason") == "interrupted"
    if not current_group().is_first:
        raise SystemExit(INTERRUPTED if interrupted else 0)
    if destination is not None and not interrupted:
        destination.save(run.load_best())
    if as_json:
        output = str(destination.path) if destination is not None and not interrupted else None
        print_json({"run": str(run.path), "output": output, **end, "validation": run.read_results()})
    else:
        steps = f"{end['step']:,} step{'' if end['step'] == 1 else 's'}"
        remark(f"{end['reason'].replace('_', ' ')} after {steps}{_total(run, end['step'])}: {run.path}")
        if interrupted:
            remark(f"to resume: onward train --resume {run.path}")
        elif destination is not None:
            remark(f"wrote {destination.describe()}")
        remark(f"report: onward report {run.path}")
    if interrupted:
        raise SystemExit(INTERRUPTED)


def _total(run: Run, steps: int) -> str:
    """Return the step of a training model that had updates before the run, as of a checkpoint."""
    settings = run.read_config()
    if settings.get("checkpoint") is None and "loss" in settings:
        return ""
    from onward.errors import Error
    from onward.run_state.reading import read_training

    with contextlib.suppress(Error):  # a step that is not from Onward may have no count
        total = read_training(run.load_training(), 0).step
        return f", at step {total:,}" if total > steps else ""
    return ""


def _show_folds(validation: CrossValidation, as_json: bool) -> None:
    if as_json:
        print_json(validation.to_json())
    else:
        print_rows(validation.rows(), styles=("bold",))
        remark(f"{'done' if validation.is_finished else 'interrupted'}: {validation.path}")
    if not validation.is_finished:
        remark(f"to resume: onward train --resume {validation.path}")

        raise SystemExit(INTERRUPTED)
