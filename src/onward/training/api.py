"""`onward.train` and `onward.resume`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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
from onward.recipe import Recipe, quantize
from onward.recipe.exporter_notes import folding_remarks
from onward.recipe.metrics import chosen_metrics, measures_of
from onward.recipe.preprocessing import with_preprocessing
from onward.run_state.reading import blame_model, last_update, rate_now, read_training
from onward.training.callbacks import Callback
from onward.training.config import Config, refuse_placeholders, settings_from
from onward.training.data import differences, in_parts, not_compared
from onward.training.feed import Feed, calibrate_on, open_feed
from onward.training.folder import Folder, Follower
from onward.training.loop import Loop
from onward.training.lr_finder import find_lr
from onward.training.preparation import prepare_training, with_head_of
from onward.training.run import BEST, TRAINING, Place, Run
from onward.transform.training import strip

__all__ = ["find_lr", "resume", "train"]

_OF_CHECKPOINTS = ("names", "updates", "updates_per_epoch")
"""Options of a run that have a meaning for checkpoints only."""


@dataclasses.dataclass(frozen=True)
class _Objects(ModelAndData):
    _: dataclasses.KW_ONLY
    recipe: Recipe | None = None
    config: str | os.PathLike[str] | TrainConfig | None = None


@dataclasses.dataclass(frozen=True)
class CrossValidationArguments(TrainOptions, _Objects):
    """What `cross_validate` takes."""

    model: Source = None  # type: ignore[assignment]  # then a configuration has it
    _: dataclasses.KW_ONLY
    callbacks: Sequence[Callback] = ()
    quiet: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainArguments(CrossValidationArguments):
    """What `train` takes."""

    folds: Annotated[int, Range(least=2)] | None = redeclare(
        TrainConfig,
        "folds",
        text="with `fold`: divide the data into K equal parts, and train on all but one of them; "
        "`onward.cross_validate` trains K times",
    )


@with_options(TrainArguments)
def train(
    recipe: Recipe | None = None,
    config: str | os.PathLike[str] | TrainConfig | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **given: Any,
) -> Run:
    """Train a model on data. What comes back is a folder with everything: `run.load_best()` is the model to use.

    Ctrl-C finishes the step, saves and returns; `onward.resume` goes on as if nothing had happened.

    - `model`: a training model, or any model and a recipe: `loss=...`, `optimizer=...` as in `onward.prepare`; with a
      checkpoint, the recipe is what that does not tell: loss, optimizer, schedule, `clip`, `accumulate`, `ema`,
      `loss_scale`, `freeze`, `trainable`
    - `recipe`: an `onward.Recipe`: its options as one object
    - `config`: an `onward.TrainConfig`: all other options as one object. Or a .yaml or .toml file with any of the
      arguments, such as `config.yaml` of another run; those that are given beside it count
    - `callbacks`: what is told how it goes, and may stop it: see `onward.Callback`
    - `quiet`: show no progress

    Each option can be given by itself, or in its object; in both, it is an error.

    Examples:

        run = onward.train("digits.onnx", "digits.npz", loss="cross_entropy", epochs=10, validation=0.1)
        run.load_best().save("digits-trained.onnx")

        recipe = onward.Recipe(loss="cross_entropy", optimizer="adamw:lr=1e-3", clip="norm:1")
        config = onward.TrainConfig(epochs=10, validation=0.1, engine="torch")
        for seed in range(3):
            onward.train("digits.onnx", "digits.npz", recipe=recipe, config=config, seed=seed)
    """
    asked = settings_from("train", given, recipe, config)
    refuse_placeholders(asked)
    run = asked.pop("run", None)
    if run is not None and is_restarted() and (Path(run) / TRAINING).exists():
        return resume(run, asked.get("data"), validation=asked.get("validation"), callbacks=callbacks, quiet=quiet)
    wanted = Config.from_arguments("train", asked)
    _check_fold(wanted)
    data, validation, notes = in_parts(wanted.data, wanted.validation)
    validation = validation if wanted.fold is None else None  # a part of the data
    original, imported = _load_model(wanted)
    options = wanted.recipe if wanted.checkpoint is None else {}
    _check(wanted.patience if wanted.fold is None else None, validation)
    group = join_group(wanted.device, wanted.engine)
    if run is not None and group.is_first:
        Folder(run).refuse_if_in_use()
    seed = wanted.seed or 0
    made = prepare_training(original, data, wanted.columns, asked.get("batch_size"), options, seed, wanted.window)
    training = made.model
    if wanted.reset:
        training = start_over(training if wanted.seed is None else with_seed(training, seed))
        stored = state_left_as_stored(training)
        kept = f"; kept as stored: {list_names(stored, 3)}" if stored else ""
        made.notes.append(f"reset to its initialization{kept}")
    original = with_head_of(options, original, seed)
    if "quantize" in options:
        original = strip(quantize.add(original, options["quantize"]))
    if wanted.keep_preprocessing:
        if made.preprocess is None:
            raise RecipeError("there is no preprocessing to keep", hint="give some: `preprocess=...`")
        original = with_preprocessing(original, made.preprocess)
    settled = dataclasses.replace(
        wanted,
        data=data,
        validation=validation,
        batch_size=made.batch_size,
        metrics=chosen_metrics(training, asked.get("metrics"), wanted.monitor),
        seed=wanted.seed if wanted.reset else seed,
    ).spread_over(group)
    measures = measures_of(training, settled.metrics, settled.monitor)
    folder, at = _folder(run, original, group), Place()
    with folder.begin(original, training, settled.to_json(), at), settled.start_engine(training) as loaded:
        feed = open_feed(loaded, settled, made.data)
        settled = dataclasses.replace(settled, classes=list(feed.classes) if feed.classes else None)
        folder.configure(settled.to_json())
        at.data = group.gather(feed.identify() if group.is_first else None)[0]
        said = [
            *notes,
            *imported,
            *folding_remarks(training),
            *made.notes,
            *_schedule_notes(training, settled, feed, at),
        ]
        said += [*feed.notes, *calibrate_on(feed, loaded)]
        Loop(folder, loaded, settled, feed, measures, at)(said, callbacks, quiet)
    group.wait()  # until all is written
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
    """Go on with a run, as if nothing had happened.

        run = onward.resume("runs/digits", epochs=20)

    - `run`: its folder, or what `train` returned
    - `data`, `validation`: given again where they came from Python; else they are where they were
    - `data_changed`: accept data that are not those of the run; an epoch that was under way starts over with them
    - `epochs`: how many there are in all: with more of them, a run that has ended goes on
    - `engine`, `device`, `strategy`, `mesh`, `deepspeed_config`: what it goes on with; as before unless given
    - `callbacks`: those that are to be told, as for `train`
    - `quiet`: show no progress
    """
    run = run if isinstance(run, Run) else Run(run)
    run.refuse_if_empty()
    stored = run.read_config()
    group = join_group(device or stored.get("device", "cpu"), engine or stored.get("engine", "onnxruntime"))
    folder = Folder(run.path) if group.is_first else Follower(run.path)
    with folder.reopen() as training:
        data, own, _ = in_parts(data, validation)
        if isinstance(stored.get("validation"), str | list):  # not a share of the data, nor nothing
            validation = own
        before = Config.from_settings(stored, data=data, validation=validation, epochs=epochs)
        config = before.on_engine(engine or before.engine, device or before.device)
        config = config.shared_out(strategy, mesh, deepspeed_config).spread_over(group)
        place = Place.of(training)
        notes = [*folder.notes]
        if place.best is not None and not (run.path / BEST).exists():
            notes.append(f"{BEST} is missing: the next result counts as the best")
            place.best, place.since_best = None, 0
        if config.precision != before.precision:
            notes.append(f"precision `{before.precision}` was that of {before.engine}; it goes on in the model's own")
        with config.start_engine(training) as loaded:
            feed = open_feed(loaded, config)
            facts = group.gather(feed.identify() if group.is_first else None)[0]
            notes += _recognize(place, facts, data_changed)
            folder.configure(config.to_json())
            measures = measures_of(training, config.metrics, config.monitor)
            if epochs is not None or data_changed:
                notes += _schedule_notes(training, config, feed, place)
            said = [*notes, *feed.notes, *calibrate_on(feed, loaded)]
            Loop(folder, loaded, config, feed, measures, place)(said, callbacks, quiet)
    group.wait()
    return Run(folder.path)


def _recognize(place: Place, facts: dict[str, Any], data_changed: bool) -> list[str]:
    """Compare the data with those of the run. Return what the user should know, with epochs counted for the new data.

    Raises:
        DataError: if the data have changed, and that is not accepted.
    """
    before, place.data = place.data, facts
    if before is None:
        return ["the run does not say what its data were: they were not compared"]
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
            changes[name] = f"{noun} have changed: there were {'some' if new is None else 'none'}"
    if not changes:
        return notes
    told = "; ".join(changes.values())
    if not data_changed:
        raise DataError(told, hint="accept that with `--data-changed` (`onward.resume(run, data_changed=True)`)")
    if "data" in changes and place.batch:
        told += f"; epoch {place.epoch + 1} starts over"
        place.batch, place.losses, place.counted = 0, 0.0, 0
    if place.best is not None and ("validation" in changes or "validation" not in facts):
        told += "; the best result so far was on other data, and no longer counts"
        place.best, place.since_best = None, 0
    return [*notes, told]


def _schedule_notes(training: Model, config: Config, feed: Feed, place: Place) -> list[str]:
    """Warn of a schedule that ends before the run, and leaves next to nothing of the learning rate."""
    per_epoch = feed.training.per_epoch
    if per_epoch is None or len(training.steps) > 1:  # then nobody knows how many updates a step makes
        return []
    with contextlib.suppress(Error), blame_model():
        state = read_training(training, 0)
        end, lr = last_update(state.schedule), state.groups[0].settings.get("lr") if state.groups else None
        if end is None or not isinstance(lr, int | float):
            return []
        batches = 1 if state.accumulate is None else state.accumulate
        left = (config.epochs - place.epoch) * per_epoch - place.batch
        updates = state.step + left // (int(batches) if isinstance(batches, int | float) and batches >= 1 else 1)
        rate = rate_now(state.schedule, float(lr), end)
        if updates > end and rate is not None and abs(rate) < _NO_RATE * abs(lr):
            section = state.schedule[-1].options
            length, every = section.get("steps"), section.get("every", 1)
            if not isinstance(length, int | float) or not isinstance(every, int | float):
                return []
            return [
                f"the schedule ends at step {end:,} of {updates:,}: the learning rate is {rate:.3g} from there; "
                f"to cover the run, give it `steps={length - (end - updates) // every:g}`"
            ]
    return []


_NO_RATE = 1e-3
"""The share of the learning rate below which training stands still."""


# ---- before the run --------------------------------------------------------------------------------------------------


def _load_model(wanted: Config) -> tuple[Model, list[str]]:
    """The model, or the training model that goes on from a checkpoint of it, and what is to be known about that."""
    if wanted.checkpoint is None:
        if useless := [name for name in _OF_CHECKPOINTS if getattr(wanted, name) is not None]:
            raise RecipeError(
                f"`{useless[0]}` has no effect without a checkpoint", hint="give one: `--checkpoint CHECKPOINT`"
            )
        return load(wanted.model), []
    untold = {field.name for field in dataclasses.fields(MissingOptions)}
    useless = [name for name in wanted.recipe if name not in untold] + ["reset"] * wanted.reset
    if useless:
        raise RecipeError(
            f"`{useless[0]}` has no effect with a checkpoint", hint="leave it out: a checkpoint says how it goes on"
        )
    from onward.importing import apply_plan, plan_import

    counts = {name: getattr(wanted, name) for name in _OF_CHECKPOINTS}
    planned = plan_import(wanted.checkpoint, wanted.model, **counts, **wanted.recipe)
    return apply_plan(planned), list(planned.notes)


def _check_fold(wanted: Config) -> None:
    if (wanted.folds is None) != (wanted.fold is None):
        raise RecipeError(
            "`fold` needs `folds`" if wanted.folds is None else "`folds` needs `fold`: this trains one run",
            hint="all runs: `onward.cross_validate(..., folds=5)`; one of them: `onward.train(..., folds=5, fold=1)`",
        )
    if wanted.folds is not None and wanted.validation is not None:
        raise DataError("folds validate each other, and `validation` says otherwise", hint="leave one of them out")


def _check(patience: int | None, validation: Any) -> None:
    if isinstance(validation, str) and re.fullmatch(r"[\d.]+%", validation) and not os.path.exists(validation):
        share = f"{float(validation.removesuffix('%')) / 100:g}"
        raise DataError(f"`validation={validation}` is no share of the data", hint=f"write `validation={share}`")
    if isinstance(validation, int | float) and not 0 < validation < 1:
        raise DataError(
            f"`validation={validation:g}` is no share of the data", hint="give a number between 0 and 1, or more data"
        )
    if patience is not None and validation is None:
        raise RecipeError(
            "`patience` waits for better results on validation data, and there are none",
            hint="give some, or a share of the data: `validation=0.1` (`--validation 0.1`)",
        )


def _folder(run: str | os.PathLike[str] | None, original: Model, group: ProcessGroup) -> Folder:
    """The folder of a new run, which the first of several processes chooses and writes to."""
    if not group.is_first:
        return Follower(group.gather(None)[0])
    folder = Folder(run) if run is not None else new_folder(original)
    group.gather(folder.path)
    return folder


def new_folder(model: Model) -> Folder:
    """A folder that was not there, and is now: another process may look for one in the same second."""
    name = model.path.stem if model.path else model.graph.name or "model"
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        run = Folder(Path("runs") / (stem if number == 1 else f"{stem}-{number}"))
        with contextlib.suppress(FileExistsError):
            run.make(new=True)
            return run
    raise AssertionError("there is always another name")
