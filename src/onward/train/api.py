"""`onward.train` and `onward.resume`."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from onward.errors import DataError, RecipeError
from onward.model import Model, Source, read
from onward.model.state import states
from onward.recipe import prepare
from onward.run import Engine, load
from onward.train.data import Batches, Dataset, Stream, match, open_data, split
from onward.train.folder import Run
from onward.train.loop import Loop, Measures, Settings

Last = Literal["keep", "drop", "pad"]


@dataclasses.dataclass(frozen=True)
class Config:
    """How a run was started: enough to go on with it."""

    model: str
    data: Any
    epochs: int
    batch_size: int
    validation: Any
    columns: Mapping[str, str]
    shuffle: bool
    last: Last
    seed: int
    metrics: tuple[str, ...]
    monitor: str | None
    patience: int | None
    save_every: float
    tensorboard: bool
    engine: str
    device: str
    threads: int | None
    recompute: Any


def train(
    model: Source,
    data: Any,
    *,
    epochs: int = 1,
    batch_size: int = 32,
    validation: Any = None,
    run: str | os.PathLike[str] | None = None,
    columns: Mapping[str, str] | None = None,
    shuffle: bool = True,
    last: Last = "keep",
    seed: int = 0,
    metrics: Sequence[str] | str | None = None,
    monitor: str | None = None,
    patience: int | None = None,
    save_every: float = 60.0,
    tensorboard: bool = False,
    engine: str = "onnxruntime",
    device: str = "cpu",
    threads: int | None = None,
    recompute: Any = None,
    quiet: bool = False,
    **recipe: Any,
) -> Run:
    """Train a model on data. What comes back is a folder with everything: `run.best` is the model to use.

    - `model`: a training model, or any model and a recipe: `loss=...`, `optimizer=...` as in `onward.prepare`
    - `data`: a path (.npz, .csv, .parquet, a folder of images ...), arrays by name, or anything that gives batches
    - `validation`: more data, or a share of it that is kept apart, such as 0.1
    - `run`: the folder; a new one below `runs/` if it is not given
    - `columns`: input of the model -> column of the data, where names and shapes do not say it
    - `last`: what happens to a last batch that is not full: `"keep"`, `"drop"` or `"pad"`
    - `metrics`: measured on the validation data, such as `"accuracy"`; by default what suits the loss
    - `monitor`: the metric that decides which model is the best; `patience`: epochs to wait for a better one
    - `recompute`: saves memory, as in `onward.gradient`
    """
    original = read(model)
    if original.is_training_model and recipe:
        raise RecipeError(
            f"the model carries its training already, so `{next(iter(recipe))}` has no effect",
            hint="leave it out, or strip the model first (`onward.strip`)",
        )
    training = original if original.is_training_model else prepare(original, **_with_loss(recipe), seed=seed)
    config = Config(
        model=str(original.path or "model.onnx"),
        data=data,
        epochs=epochs,
        batch_size=batch_size,
        validation=validation,
        columns=dict(columns or {}),
        shuffle=shuffle,
        last=last,
        seed=seed,
        metrics=_measures(training, metrics),
        monitor=monitor,
        patience=patience,
        save_every=save_every,
        tensorboard=tensorboard,
        engine=engine,
        device=device,
        threads=threads,
        recompute=recompute,
    )
    place = Path(run) if run is not None else _new_folder(original)
    return _go(Run.start(place, training, original, _as_json(config)), training, config, quiet)


def resume(
    run: str | os.PathLike[str],
    data: Any = None,
    *,
    validation: Any = None,
    epochs: int | None = None,
    quiet: bool = False,
) -> Run:
    """Go on with a run, as if nothing had happened. Data that came from Python must be given again."""
    folder = Run(run)
    training, stored = folder.model, folder.config
    for name, given in (("data", data), ("validation", validation), ("epochs", epochs)):
        if given is not None:
            stored[name] = given
        elif stored.get(name) == _OBJECT:
            raise DataError(f"the {name} of this run came from Python", hint=f"give it again: resume(..., {name}=...)")
    try:
        config = Config(**{**stored, "metrics": tuple(stored["metrics"])})
    except (TypeError, KeyError) as error:
        raise DataError(f"`{folder.path}` was started by another version of Onward: {error}") from error
    return _go(folder, training, config, quiet)


def _go(run: Run, training: Model, config: Config, quiet: bool) -> Run:
    with load(
        training, engine=config.engine, device=config.device, threads=config.threads, recompute=config.recompute
    ) as engine:
        batches, validation = _batches(engine, config)
        settings = Settings(
            epochs=config.epochs,
            monitor=config.monitor or (config.metrics[0] if config.metrics else "loss"),
            patience=config.patience,
            save_every=config.save_every,
            tensorboard=config.tensorboard,
            quiet=quiet,
        )
        names = {s.name for s in states(training) if s.role == "parameter"}
        opening = {
            "model": config.model,
            "parameters": sum(
                s.value.const_value.size for s in states(training) if s.name in names and s.value.const_value
            ),
            "recipe": training.step().fact("train.recipe"),
            "config": _as_json(config),
            "device": config.device,
            "engine": config.engine,
        }
        Loop(run, engine, batches, validation, _measured(training, config), settings)(opening)
    return run


def _batches(engine: Engine, config: Config) -> tuple[Batches, Batches | None]:
    """Batches for training and for validation."""
    data: Dataset | Stream = open_data(config.data, inputs=engine.inputs)
    held_out: Dataset | Stream | None = None
    if isinstance(config.validation, float):
        data, held_out = split(data, config.validation, config.seed)
    elif config.validation is not None:
        held_out = open_data(config.validation, inputs=engine.inputs)
    labels, classes, ignored = _classes(engine.model)

    def batches(source: Dataset | Stream, shuffle: bool, last: Last) -> Batches:
        return Batches(
            source,
            match(source.columns, engine.inputs, config.columns),
            size=config.batch_size,
            shuffle=shuffle,
            seed=config.seed,
            last=last,
            classes={labels: classes} if labels is not None and classes is not None else None,
            ignore=ignored,
        )

    training = batches(data, config.shuffle, config.last)
    return training, batches(held_out, False, "keep") if held_out is not None else None


def _classes(training: Model) -> tuple[str | None, int | None, int | None]:
    """The input that holds classes by number, how many there are, and the number that means none."""
    losses = training.step().fact("train.loss") or []
    for loss in losses:
        output = next((value for value in training.graph.outputs if value.name == loss.get("output")), None)
        if loss.get("name") in ("cross_entropy", "nll") and output is not None and output.shape is not None:
            count = output.shape[1] if len(output.shape) > 1 else None
            ignored = (loss.get("options") or {}).get("ignore_index", -100)
            return (loss.get("inputs") or [None])[0], count if isinstance(count, int) else None, ignored
    return None, None, None


def _with_loss(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    if "loss" not in recipe:
        raise RecipeError("to train a model one must know its loss", hint='for example loss="cross_entropy"')
    return recipe


_SUITABLE = {
    "cross_entropy": "accuracy",
    "nll": "accuracy",
    "bce": "accuracy",
    "mse": "mae",
    "l1": "mae",
    "huber": "mae",
}


def _measures(training: Model, given: Sequence[str] | str | None) -> tuple[str, ...]:
    if given is not None:
        return (given,) if isinstance(given, str) else tuple(given)
    losses = training.step().fact("train.loss") or []
    return (_SUITABLE[losses[0]["name"]],) if len(losses) == 1 and losses[0]["name"] in _SUITABLE else ()


def _measured(training: Model, config: Config) -> Measures:
    losses = training.step().fact("train.loss") or [{}]
    inputs = losses[0].get("inputs") or [None]
    return Measures(config.metrics, losses[0].get("output"), inputs[0])


def _new_folder(model: Model) -> Path:
    name = model.path.stem if model.path else model.graph.name or "model"
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


_OBJECT = "<object>"


def _as_json(config: Config) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, str | int | float | bool) or value is None:
            return value
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, list | tuple) and all(isinstance(item, str | int | os.PathLike) for item in value):
            return [plain(item) for item in value]
        if isinstance(value, Mapping) and all(isinstance(item, str | os.PathLike) for item in value.values()):
            return {name: plain(item) for name, item in value.items()}
        return _OBJECT

    return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}
