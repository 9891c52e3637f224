"""`onward.train` and `onward.resume`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from onward.arguments import Range, checked
from onward.engines.distributed import ProcessGroup, is_restarted, join_group
from onward.engines.initialization import start_over, state_left_as_stored, with_seed
from onward.errors import DataError, Error, RecipeError, list_names
from onward.model import Model, Source, load
from onward.options import (
    Data,
    MissingOptions,
    ModelAndData,
    Parallel,
    TrainConfig,
    TrainOptions,
    Validation,
    redeclare,
    with_options,
)
from onward.recipe import quantize
from onward.recipe.exporter_notes import folding_remarks
from onward.recipe.metrics import chosen_metrics, measures_of
from onward.recipe.prepare import Recipe
from onward.recipe.preprocessing.join import with_preprocessing
from onward.recipe.schedules import EXAMPLE_LENGTH
from onward.run_state.reading import blame_model, last_update, rate_now, read_training
from onward.training.callbacks import Callback
from onward.training.config import Config, refuse_placeholders, settings_from
from onward.training.data import Dataset, differences, in_parts, not_compared, open_data, split
from onward.training.feed import Feed, calibrate_on, describe_run, open_feed
from onward.training.folder import Folder, Follower
from onward.training.loop import Loop
from onward.training.lr_finder import find_lr
from onward.training.preparation import prepare_training, with_head_of
from onward.training.run import BEST, TRAINING, Position, Run
from onward.transform.declare import USUAL_BATCH, fixed_batch
from onward.transform.training import strip

__all__ = ["find_lr", "resume", "train"]

_CHECKPOINT_OPTIONS = ("names", "updates", "updates_per_epoch")
"""Options of a run that have an effect with checkpoints only; `names` also with weights."""


@dataclasses.dataclass(frozen=True)
class _Objects(ModelAndData):
    _: dataclasses.KW_ONLY
    recipe: Recipe | None = None
    config: str | os.PathLike[str] | TrainConfig | None = None


@dataclasses.dataclass(frozen=True)
class CrossValidationArguments(TrainOptions, _Objects):
    """Arguments of `cross_validate`."""

    model: Source = None  # type: ignore[assignment]  # None: in the configuration
    _: dataclasses.KW_ONLY
    callbacks: Sequence[Callback] = ()
    quiet: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainArguments(CrossValidationArguments):
    """Arguments of `train`."""

    folds: Annotated[int, Range(least=2)] | None = redeclare(
        TrainConfig,
        "folds",
        text="with `fold`: divide the data into K equal parts and train on all except one; "
        "`onward.cross_validate` trains K times",
    )


@with_options(TrainArguments)
def train(
    recipe: Recipe | None = None,
    config: str | os.PathLike[str] | TrainConfig | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **arguments: Any,
) -> Run:
    """Train a model on data. Return the run, a folder on disk with the trained model.

    `run.load_best()` loads the best model. Ctrl-C finishes the step, saves and returns;
    `onward.resume` continues the run.

    - `model`: a training model, or any model with a recipe: `loss=...`, `optimizer=...` as in
      `onward.prepare`. With `checkpoint`, the recipe holds only what the checkpoint lacks: loss,
      optimizer, schedule, `clip`, `accumulate`, `ema`, `loss_scale`, `freeze`, `trainable`
    - `recipe`: an `onward.Recipe`, which holds the options of the recipe
    - `config`: an `onward.TrainConfig`, which holds all other options; or a .yaml or .toml file
      with any of the arguments, such as `config.yaml` of another run. Arguments override the file
    - `callbacks`: callbacks that follow the run and may stop it: see `onward.Callback`
    - `quiet`: hide the progress

    Pass each option either directly or in its object. Both at once is an error.

    Examples:

        run = onward.train("digits.onnx", "digits.npz", loss="cross_entropy", epochs=10, validation=0.1)
        run.load_best().save("digits-trained.onnx")

        recipe = onward.Recipe(loss="cross_entropy", optimizer="adamw:lr=1e-3", clip="norm:1")
        config = onward.TrainConfig(epochs=10, validation=0.1, engine="torch")
        for seed in range(3):
            onward.train("digits.onnx", "digits.npz", recipe=recipe, config=config, seed=seed)
    """
    settings = settings_from("train", arguments, recipe, config)
    refuse_placeholders(settings)
    run = settings.pop("run", None)
    if run is not None and is_restarted() and (Path(run) / TRAINING).exists():
        data, validation = settings.get("data"), settings.get("validation")
        return resume(run, data, validation=validation, callbacks=callbacks, quiet=quiet)
    requested = Config.from_arguments("train", settings)
    _check_fold(requested)
    data, validation, notes = in_parts(requested.data, requested.validation)
    validation = validation if requested.fold is None else None  # the fold validates
    original, imported = _load_model(requested)
    options = requested.recipe if requested.checkpoint is None else {}
    _check(requested.patience if requested.fold is None else None, validation)
    group = join_group(requested.device, requested.engine)
    if run is not None and group.is_first:
        Folder(run).refuse_if_in_use()
    seed = requested.seed or 0
    size, window = settings.get("batch_size"), requested.window
    try:
        prepared = prepare_training(original, data, requested.columns, size, options, seed, window)
    except RecipeError as error:
        if error.hint is not None and (example := f"steps={EXAMPLE_LENGTH}") in error.hint:
            updates = _updates_of(requested, original, data, size)
            error.hint = error.hint if updates is None else error.hint.replace(example, f"steps={updates}")
        raise
    training = prepared.model
    if requested.reset:
        training = start_over(training if requested.seed is None else with_seed(training, seed))
        unreset = state_left_as_stored(training)
        exceptions = f"; kept as stored: {list_names(unreset, 3)}" if unreset else ""
        prepared.notes.append(f"reset to its initialization{exceptions}")
    original = with_head_of(options, original, seed)
    if "quantize" in options:
        original = strip(quantize.add(original, options["quantize"]))
    if requested.keep_preprocessing:
        if prepared.preprocess is None:
            raise RecipeError(
                "the recipe has no preprocessing to keep", hint="add it: `preprocess=...` (`--preprocess`)"
            )
        original = with_preprocessing(original, prepared.preprocess)
    resolved = dataclasses.replace(
        requested,
        data=data,
        validation=validation,
        batch_size=prepared.batch_size,
        metrics=chosen_metrics(training, settings.get("metrics"), requested.monitor),
        seed=requested.seed if requested.reset else seed,
    ).spread_over(group)
    measures = measures_of(training, resolved.metrics, resolved.monitor)
    folder, progress = _folder(run, original, group), Position()
    with folder.begin(original, training, resolved.to_json(), progress), resolved.start_engine(training) as loaded:
        feed = open_feed(loaded, resolved, prepared.data)
        describe_run(loaded.model, feed, resolved)
        resolved = dataclasses.replace(resolved, classes=list(feed.classes) if feed.classes else None)
        folder.configure(resolved.to_json())
        progress.data = group.gather(feed.identify() if group.is_first else None)[0]
        remarks = [
            *notes,
            *imported,
            *folding_remarks(training),
            *prepared.notes,
            *_schedule_notes(training, resolved, feed, progress),
        ]
        remarks += [*feed.notes, *calibrate_on(feed, loaded)]
        Loop(folder, loaded, resolved, feed, measures, progress)(remarks, callbacks, quiet)
    group.wait()  # until every process has written its part
    return Run(folder.path)


@checked()
def resume(
    run: str | os.PathLike[str] | Run,
    data: Data = None,
    *,
    validation: Validation = None,
    data_changed: bool = False,
    epochs: Annotated[int, Range(least=0)] | None = None,
    engine: str | None = None,
    device: str | None = None,
    strategy: Parallel | None = None,
    mesh: str | None = None,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> Run:
    """Resume a run from its last save.

        run = onward.resume("runs/digits", epochs=20)

    - `run`: the folder of the run, or the return value of `train`
    - `data`, `validation`: needed if they were Python objects (default: the files of the run)
    - `data_changed`: accept other data than those of the run; an epoch in progress starts over
    - `epochs`: total number of epochs; more of them continue a finished run
    - `engine`, `device`, `strategy`, `mesh`, `deepspeed_config`: where to continue (default: as
      before)
    - `callbacks`: callbacks, as for `train`
    - `quiet`: hide the progress
    """
    run = run if isinstance(run, Run) else Run(run)
    run.refuse_if_empty()
    stored = run.read_config()
    group = join_group(device or stored.get("device", "cpu"), engine or stored.get("engine", "onnxruntime"))
    folder = Folder(run.path) if group.is_first else Follower(run.path)
    with folder.reopen() as training:
        data, found_validation, _ = in_parts(data, validation)
        if isinstance(stored.get("validation"), str | list):  # not a fraction of the data, nor None
            validation = found_validation
        before = Config.from_settings(stored, data=data, validation=validation, epochs=epochs)
        config = before.on_engine(engine or before.engine, device or before.device)
        config = config.shared_out(strategy, mesh, deepspeed_config).spread_over(group)
        progress = Position.of(training)
        notes = [*folder.notes]
        if progress.best is not None and not (run.path / BEST).exists():
            notes.append(f"{BEST} is missing: the next result becomes the best")
            progress.best, progress.since_best = None, 0
        if config.precision != before.precision:
            notes.append(f"precision `{before.precision}` belongs to {before.engine}; continuing in the model's type")
        with config.start_engine(training) as loaded:
            feed = open_feed(loaded, config)
            describe_run(loaded.model, feed, config)
            facts = group.gather(feed.identify() if group.is_first else None)[0]
            notes += _recognize(progress, facts, data_changed)
            folder.configure(config.to_json())
            measures = measures_of(training, config.metrics, config.monitor)
            if epochs is not None or data_changed:
                notes += _schedule_notes(training, config, feed, progress)
            remarks = [*notes, *feed.notes, *calibrate_on(feed, loaded)]
            Loop(folder, loaded, config, feed, measures, progress)(remarks, callbacks, quiet)
    group.wait()
    return Run(folder.path)


def _recognize(progress: Position, facts: dict[str, Any], data_changed: bool) -> list[str]:
    """Compare the data with those of the run. Return notes, and reset counts that other data make
    void.

    Raises:
        DataError: if the data have changed and `data_changed` is false.
    """
    before, progress.data = progress.data, facts
    if before is None:
        return ["the run does not record its data: they were not compared"]
    nouns = {"data": "the training data", "validation": "the validation data"}
    changes, notes = {}, []
    for name, noun in nouns.items():
        old, new = before.get(name), facts.get(name)
        if isinstance(old, Mapping) and new is not None:
            if changed := differences(old, new):
                changes[name] = f"{noun} have changed: {', '.join(changed)}"
            elif gap := not_compared(old, new):
                notes.append(f"{noun}: {gap}")
        elif old is not new:
            changes[name] = f"{noun} have changed: they were {'removed' if new is None else 'added'}"
    if not changes:
        return notes
    text = "; ".join(changes.values())
    if not data_changed:
        raise DataError(text, hint="to accept them: `--data-changed` (`onward.resume(run, data_changed=True)`)")
    if "data" in changes and progress.batch:
        text += f"; epoch {progress.epoch + 1} starts over"
        progress.batch, progress.losses, progress.counted = 0, 0.0, 0
    if progress.best is not None and ("validation" in changes or "validation" not in facts):
        text += "; the best result was measured on other data and is dropped"
        progress.best, progress.since_best = None, 0
    return [*notes, text]


def _schedule_notes(training: Model, config: Config, feed: Feed, progress: Position) -> list[str]:
    """Warn about a schedule that ends before the run at almost zero learning rate."""
    per_epoch = feed.training.per_epoch
    if per_epoch is None or len(training.steps) > 1:  # the number of updates is unknown
        return []
    with contextlib.suppress(Error), blame_model():
        state = read_training(training, 0)
        end, lr = last_update(state.schedule), state.groups[0].settings.get("lr") if state.groups else None
        if end is None or not isinstance(lr, int | float):
            return []
        batches = 1 if state.accumulate is None else state.accumulate
        left = (config.epochs - progress.epoch) * per_epoch - progress.batch
        updates = state.step + left // (int(batches) if isinstance(batches, int | float) and batches >= 1 else 1)
        rate = rate_now(state.schedule, float(lr), end)
        if updates > end and rate is not None and abs(rate) < _NO_RATE * abs(lr):
            section = state.schedule[-1].options
            length, every = section.get("steps"), section.get("every", 1)
            if not isinstance(length, int | float) or not isinstance(every, int | float):
                return []
            return [
                f"the schedule ends at step {end:,} of {updates:,}: the learning rate is {rate:.3g} from there; "
                f"to cover the run, set `steps={length - (end - updates) // every:g}`"
            ]
    return []


_NO_RATE = 1e-3
"""Fraction of the learning rate below which training stands still."""


# ---- before the run --------------------------------------------------------------------------------------------------


def _load_model(config: Config) -> tuple[Model, list[str]]:
    """Return the model, or the training model of a checkpoint, and notes about its import."""
    if config.checkpoint is None:
        unused = _CHECKPOINT_OPTIONS[1:] if config.weights is not None else _CHECKPOINT_OPTIONS
        if useless := [name for name in unused if getattr(config, name) is not None]:
            raise RecipeError(
                f"`{useless[0]}` has no effect without a checkpoint", hint="add one: `--checkpoint CHECKPOINT`"
            )
        return (load(config.model), []) if config.weights is None else _load_weights(config)
    if config.weights is not None:
        raise RecipeError("both `checkpoint` and `weights` are given", hint="omit one of them")
    accepted = {field.name for field in dataclasses.fields(MissingOptions)}
    useless = [name for name in config.recipe if name not in accepted] + ["reset"] * config.reset
    if useless:
        raise RecipeError(
            f"`{useless[0]}` has no effect with a checkpoint", hint="leave it out: the checkpoint determines it"
        )
    from onward.importing import apply_plan, plan_import

    counts = {name: getattr(config, name) for name in _CHECKPOINT_OPTIONS}
    planned = plan_import(config.checkpoint, config.model, **counts, **config.recipe)
    return apply_plan(planned), [*planned.match.rules, *planned.notes]


def _load_weights(config: Config) -> tuple[Model, list[str]]:
    from onward.importing import with_weights

    assert config.weights is not None
    return with_weights(config.model, config.weights, config.names)


def _check_fold(config: Config) -> None:
    if (config.folds is None) != (config.fold is None):
        raise RecipeError(
            "`fold` needs `folds`" if config.folds is None else "`folds` needs `fold`: this trains one run",
            hint="all runs: `onward.cross_validate(..., folds=5)`; one of them: `onward.train(..., folds=5, fold=1)`",
        )
    if config.folds is not None and config.validation is not None:
        raise DataError("`validation` has no effect with folds", hint="leave one of them out")


def _check(patience: int | None, validation: Any) -> None:
    if isinstance(validation, str) and re.fullmatch(r"[\d.]+%", validation) and not os.path.exists(validation):
        fraction = f"{float(validation.removesuffix('%')) / 100:g}"
        raise DataError(f"`validation={validation}` is not a fraction", hint=f"write `validation={fraction}`")
    if isinstance(validation, int | float) and not 0 < validation < 1:
        raise DataError(
            f"`validation={validation:g}` is not a fraction between 0 and 1",
            hint="for example `validation=0.1` (`--validation 0.1`), or a file of validation data",
        )
    if patience is not None and validation is None:
        raise RecipeError(
            "`patience` needs validation data",
            hint="hold out a fraction of the data: `validation=0.1` (`--validation 0.1`)",
        )


def _updates_of(config: Config, model: Model, data: Any, size: int | None) -> int | None:
    """Return the updates of a new run; None if unknown. Folds and several processes change it."""
    accumulate = config.recipe.get("accumulate") or 1
    if config.fold is not None or not isinstance(accumulate, int):
        return None
    with contextlib.suppress(Error):
        opened = open_data(data, window=config.window)
        if isinstance(config.validation, float):
            opened, _ = split(opened, config.validation)
        if isinstance(opened, Dataset):
            fixed = fixed_batch(model) or 1  # 1 becomes dynamic
            size = size or (fixed if fixed > 1 else USUAL_BATCH)
            return config.epochs * math.ceil(len(opened) / size) // accumulate
    return None


def _folder(run: str | os.PathLike[str] | None, original: Model, group: ProcessGroup) -> Folder:
    """Return the folder of a new run. The first process chooses it and writes to it."""
    if not group.is_first:
        return Follower(group.gather(None)[0])
    folder = Folder(run) if run is not None else new_folder(original)
    group.gather(folder.path)
    return folder


def new_folder(model: Model) -> Folder:
    """Make a new folder in `runs/`, with another name if a second process takes the same one."""
    name = model.path.stem if model.path else model.graph.name or "model"
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        run = Folder(Path("runs") / (stem if number == 1 else f"{stem}-{number}"))
        with contextlib.suppress(FileExistsError):
            run.make(new=True)
            return run
    raise AssertionError("unreachable: count() never ends")
