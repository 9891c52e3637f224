"""`onward.train` and `onward.resume`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from onward.arguments import Count, Range, Seed, Threads, checked
from onward.differentiate.recompute import Choice
from onward.engines.initialization import started_over, state_left_as_stored, with_seed
from onward.errors import DataError, RecipeError, listed
from onward.model import Model, Source, load
from onward.recipe import prepare, replace_head
from onward.recipe.preprocessing import with_preprocessing
from onward.recipe.spec import arguments
from onward.training.callbacks import Callback
from onward.training.config import Config, Last
from onward.training.data import in_parts
from onward.training.evaluation import Measures
from onward.training.feed import feeds
from onward.training.folder import Place, Run
from onward.training.labels import labels_of
from onward.training.loop import Loop
from onward.training.lr_finder import find_lr
from onward.training.objective import Objective, objectives
from onward.training.preparation import prepared

__all__ = ["find_lr", "resume", "train"]


@checked(rest=prepare)
def train(
    model: Source,
    data: Any,
    *,
    epochs: Annotated[int, Range(least=0)] = 1,
    batch_size: Count | None = None,
    validation: Any = None,
    run: str | os.PathLike[str] | None = None,
    columns: Mapping[str, str | Sequence[str]] | None = None,
    shuffle: bool = True,
    last: Last = "keep",
    reset: bool = False,
    seed: Seed | None = None,
    metrics: Sequence[str] | str | None = None,
    monitor: str | None = None,
    patience: Count | None = None,
    stratify: bool | None = None,
    keep_preprocessing: bool = False,
    save_every: Annotated[float, Range(least=0)] = 60.0,
    tensorboard: bool = False,
    statistics: bool = True,
    engine: str = "onnxruntime",
    device: str = "cpu",
    threads: Threads | None = None,
    recompute: Choice = None,
    compile: bool = True,
    precision: str | None = None,
    deterministic: bool = False,
    steps: str | Mapping[str, Count] | None = None,
    noise: Mapping[str, str] | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **recipe: Any,
) -> Run:
    """Train a model on data. What comes back is a folder with everything: `run.best` is the model to use.

    - `model`: a training model, or any model and a recipe: `loss=...`, `optimizer=...` as in `onward.prepare`
    - `data`: a path (.npz, .csv, .parquet, a folder of images ...), arrays by name, or anything that gives batches
    - `batch_size`: 32 unless given; a model for one size of batch is made to take any, where that is possible
    - `validation`: more data, or a share of it that is kept apart, such as 0.1
    - `run`: the folder; a new one below `runs/` if it is not given
    - `stratify`: whether a share has its part of every class; where labels are classes, unless they are costly to read
    - `preprocess`, `augment`: what happens to data first, as in `onward.prepare`; what comes out takes what the model
      took, or with `keep_preprocessing` data as they are
    - `columns`: input of the model -> column of the data, where names and shapes do not say it
    - `last`: what happens to a last batch that is not full: `"keep"`, `"drop"` or `"pad"`
    - `reset`: start from the initialization of a training model, as `onward.reset` does, and not from its state
    - `seed`: for the order of samples, a recipe and a reset; 0 unless given, but for a reset what the model has
    - `metrics`: measured on the validation data, such as `"accuracy"`; by default what suits the loss
    - `monitor`: the metric that decides which model is the best, which is measured, too; `patience`: epochs to wait for
      a better one
    - `steps`: of a model with several, which run and how often in a round, such as `"discriminator:2,generator"`;
      unless given, all, as the file says. `noise`: inputs that are random numbers, such as `{"z": "normal"}`
    - `save_every`: seconds after which the state is saved, also within an epoch
    - `statistics`: whether norms of gradients and histograms of weights are logged, which the report shows
    - `callbacks`: what is told how it goes, and may stop it: see `onward.Callback`
    - `recompute`: saves memory, as in `onward.gradient`
    - `engine`, `device`: what runs it, and where; `compile`, `precision` (`"bfloat16"` ...) and `deterministic` are for
      engines that have them: see `onward.engines.start`

    Ctrl-C finishes the step, saves and returns; `onward.resume` goes on as if nothing had happened.
    """
    original = load(model)
    data, validation, notes = in_parts(data, validation)
    _check(patience, validation)
    if run is not None:
        Run(run).refuse_if_in_use()
    made = prepared(original, data, columns or {}, batch_size, recipe, seed or 0)
    training = made.model
    if reset:
        training = started_over(training if seed is None else with_seed(training, seed))
        made.notes.append(_reset_note(training))
    if "new_head" in recipe:  # then what is trained is not what was given
        head = arguments(replace_head, recipe["new_head"])
        original = replace_head(original, **{"seed": seed or 0, **head})
    if keep_preprocessing:
        if made.preprocess is None:
            raise RecipeError("there is no preprocessing to keep", hint="give some: `preprocess=...`")
        original = with_preprocessing(original, made.preprocess)
    config = Config(
        model=str(original.path or "model.onnx"),
        data=data,
        epochs=epochs,
        batch_size=made.batch_size,
        validation=validation,
        columns=dict(columns or {}),
        shuffle=shuffle,
        last=last,
        seed=seed or 0,
        metrics=_metrics(training, metrics, monitor),
        monitor=monitor,
        patience=patience,
        save_every=save_every,
        tensorboard=tensorboard,
        statistics=statistics,
        engine=engine,
        device=device,
        threads=threads,
        recompute=recompute,
        compile=compile,
        precision=precision,
        deterministic=deterministic,
        stratify=stratify,
        reset=reset,
        steps=steps,
        noise=dict(noise or {}),
    )
    measures = _measures(training, config)
    folder, at = Run(run) if run is not None else _new_folder(original), Place()
    with folder.started(original, training, config.to_json(), at), config.start_engine(training) as loaded:
        feed = feeds(loaded, config, made.data)
        config = dataclasses.replace(config, classes=list(feed.classes) if feed.classes else None)
        folder.configure(config.to_json())
        Loop(folder, loaded, config, feed, measures, at)([*notes, *made.notes, *feed.notes], callbacks, quiet)
    return folder


@checked()
def resume(
    run: str | os.PathLike[str] | Run,
    data: Any = None,
    *,
    validation: Any = None,
    epochs: Annotated[int, Range(least=0)] | None = None,
    engine: str | None = None,
    device: str | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> Run:
    """Go on with a run, as if nothing had happened. Data that came from Python must be given again.

    `epochs` is how many there are in all: with more of them, a run that has ended goes on. With another `engine` or
    `device` than before, it goes on there. `callbacks` are given again, too.
    """
    folder = run if isinstance(run, Run) else Run(run)
    with folder.resumed() as training:
        data, own, _ = in_parts(data, validation)
        if isinstance(folder.config.get("validation"), str | list):  # not a share of the data, nor nothing
            validation = own
        before = Config.from_json(folder.config, data=data, validation=validation, epochs=epochs)
        config = before.moved(engine or before.engine, device or before.device)
        place = Place.of(training)
        notes = [f"{place.epoch} of {config.epochs} epochs are done"] if place.epoch >= config.epochs else []
        if config.precision != before.precision:
            notes.append(f"precision `{before.precision}` was that of {before.engine}; it goes on in the model's own")
        with config.start_engine(training) as loaded:
            feed = feeds(loaded, config)
            folder.configure(config.to_json())
            measures = _measures(training, config)
            Loop(folder, loaded, config, feed, measures, place)([*notes, *feed.notes], callbacks, quiet)
    return folder


# ---- before the run --------------------------------------------------------------------------------------------------


def _check(patience: int | None, validation: Any) -> None:
    if isinstance(validation, int | float) and not 0 < validation < 1:
        raise DataError(
            f"`validation={validation}` is no share of the data", hint="give a number between 0 and 1, or more data"
        )
    if patience is not None and validation is None:
        raise RecipeError(
            "`patience` waits for better results on validation data, and there are none",
            hint="give some, or a share of the data: `validation=0.1` (`--validation 0.1`)",
        )


_SUITABLE = {
    **dict.fromkeys(("cross_entropy", "nll", "binary_cross_entropy", "bce_with_logits", "hinge"), "accuracy"),
    **dict.fromkeys(("mse", "l1", "huber", "smooth_l1"), "mae"),
}
"""What to measure, where the loss is the only one and nothing else is said."""
_THRESHOLDS = {"binary_cross_entropy": 0.5, "bce_with_logits": 0.0, "hinge": 0.0, "squared_hinge": 0.0}
"""Losses of decisions, and the outputs above which they mean yes."""


def _metrics(training: Model, given: Sequence[str] | str | None, monitor: str | None) -> tuple[str, ...]:
    """What is measured: what is given, or suits the loss, and what is monitored."""
    losses = objectives(training)
    if given is None:
        given = (_SUITABLE[losses[0].name],) if len(losses) == 1 and losses[0].name in _SUITABLE else ()
    chosen = (given,) if isinstance(given, str) else tuple(given)
    return chosen if monitor in (None, "loss", *chosen) else (*chosen, str(monitor))


def _measures(training: Model, config: Config) -> Measures:
    loss = next(iter(objectives(training)), Objective(""))
    labels = labels_of(training)
    return Measures(
        tuple(config.metrics),
        loss.output,
        loss.target,
        config.monitor or (config.metrics[0] if config.metrics else "loss"),
        axis=loss.axis,
        threshold=_THRESHOLDS.get(loss.name),
        are_classes=loss.by_number,
        ignored=labels.ignored if labels is not None and labels.name == loss.target else None,
    )


def _reset_note(training: Model) -> str:
    stored = state_left_as_stored(training)
    return "reset to its initialization" + (f"; kept as stored: {listed(stored, 3)}" if stored else "")


def _new_folder(model: Model) -> Run:
    """A folder that was not there, and is now: another process may look for one in the same second."""
    name = model.path.stem if model.path else model.graph.name or "model"
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        run = Run(Path("runs") / (stem if number == 1 else f"{stem}-{number}"))
        with contextlib.suppress(FileExistsError):
            run.make(new=True)
            return run
    raise AssertionError("there is always another name")
