"""The batches of a run: for training, and to validate with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.engines import Engine
from onward.engines.distributed import Portion
from onward.errors import DataError, UnsupportedError, list_names
from onward.model import Model
from onward.options import Last
from onward.recipe.metrics import OF_LOSS, Labels, Measures, Metric, labels_of
from onward.recipe.quantize import calibrate, has_ranges, needs_calibration
from onward.training.config import Config
from onward.training.data import (
    Batch,
    Batches,
    Binding,
    Dataset,
    Noise,
    Stream,
    files_of,
    fold,
    format_for,
    identify,
    match,
    open_data,
    split,
)
from onward.training.data.objects import SizedStream
from onward.training.preparation import check_classes, in_classes, single_pictures, strata_of, too_few_classes
from onward.transform.declare import check_batch_axis


def calibrate_on(feed: Feed, engine: Engine) -> list[str]:
    """Give a training model that is fresh its ranges, where it has such; what to say about that."""
    if engine.group.size > 1 and has_ranges(engine.model):
        raise UnsupportedError(
            "the ranges of activations are those of what one process sees, and here are several",
            hint="train in one process, or round weights alone: `quantize=int8:activations=none`",
        )
    wanted = needs_calibration(engine.model)
    if not wanted:
        return []
    batches = list(itertools.islice(feed.training.epoch(0), wanted))
    state = calibrate(engine.model, batches)
    for name, array in state.items():
        engine.model.set(name, array)
    engine.load_state(state)
    return [f"ranges are calibrated on {len(batches)} batches"]


@dataclasses.dataclass(frozen=True)
class Feed:
    training: Batches
    validation: Batches | None
    notes: list[str]
    """What the user should know about them."""
    size: int | None = None
    """The only size of batch that the model takes."""
    classes: tuple[str, ...] | None = None
    """What the numbers of labels stand for."""
    sources: tuple[_Part, ...] = ()
    """The data before they are split, and other data to validate with, if any."""

    def identify(self) -> dict[str, Any]:
        """Return the facts by which `resume` recognizes the data."""
        names = [
            list(dict.fromkeys(c for binding in part.way.values() for c in binding.columns)) for part in self.sources
        ]
        facts = [
            identify(part.data, name, files_of(part.source)) for part, name in zip(self.sources, names, strict=True)
        ]
        return dict(zip(("data", "validation"), facts, strict=False))


@dataclasses.dataclass(frozen=True)
class _Part:
    """Data, and which columns of them the inputs take."""

    data: Dataset | Stream
    way: Mapping[str, Binding]
    notes: tuple[str, ...] = ()
    source: Any = None
    """What they were opened from."""


def open_feed(engine: Engine, config: Config, opened: Dataset | Stream | None = None) -> Feed:
    """Open the data of a run, unless they are `opened`, and match them with the model."""
    labels = labels_of(engine.model)
    fixed = check_batch_axis(engine.of_a_batch, engine.model.inputs, processes=engine.group.size)
    noise = Noise(config.noise, engine.of_a_batch, config.seed or 0)
    inputs = {name: value for name, value in engine.of_a_batch.items() if name not in config.noise}
    whole, part, held_out = _parts(engine.model, inputs, config, opened, labels)
    notes = dict.fromkeys(binding.note for binding in part.way.values() if binding.note)
    if few := too_few_classes(part.data, part.way, labels):
        notes[few] = None
    notes |= dict.fromkeys(held_out.notes if held_out is not None else ())

    def batches(of: _Part, shuffle: bool, last: Last) -> Batches:
        return Batches(
            of.data,
            of.way,
            size=config.batch_size,
            shuffle=shuffle,
            seed=config.seed or 0,
            last=last,
            window=config.window,
            classes={labels.name: labels.count} if labels is not None else None,
            ignore=labels.ignored if labels is not None else None,
            noise=noise,
            group=engine.group,
        )

    if isinstance(part.data, Dataset | SizedStream):
        check_batch_axis(engine.of_a_batch, engine.model.inputs, config.batch_size, engine.group.size)
    last: Last = "drop" if fixed is not None and config.last == "keep" else config.last
    training = batches(part, config.shuffle, last)
    if training.per_epoch is not None and training.per_epoch < engine.batches:
        raise DataError(
            f"the data make {training.per_epoch} batches, and the steps of a round take {engine.batches}",
            hint="make batches smaller (`--batch-size`)",
        )
    if last != config.last and isinstance(part.data, Dataset) and (rest := len(part.data) % config.batch_size):
        what = f"{rest} rows of each epoch do not fill a batch of {fixed}, and are left out"
        notes[f"{what} (`last` says otherwise)"] = None
    if held_out is not None and fixed is not None and engine.group.size > 1:
        raise DataError(
            f"the model takes batches of {fixed // engine.group.size} alone, and the last of the validation data may "
            "be smaller in some process",
            hint="export it with a batch size that may vary, or train without validation data",
        )
    validation = batches(held_out, False, "keep" if fixed is None else "pad") if held_out is not None else None
    classes = part.way[labels.name].classes if labels is not None else None
    other = held_out if held_out is not None and held_out.source is not None else None
    sources = (whole,) if other is None else (whole, other)
    return Feed(training, validation, list(notes), fixed, classes, sources)


def _parts(
    training: Model,
    inputs: Mapping[str, ir.Value],
    config: Config,
    opened: Dataset | Stream | None,
    labels: Labels | None,
) -> tuple[_Part, _Part, _Part | None]:
    """All data, those that are trained on, and those that are validated with, if any."""
    images = format_for(inputs, single_pictures(training))
    data = open_data(config.data, images=images, window=config.window) if opened is None else opened
    # A float input of the model that no column fits, beside several steps: the noise of a generator.
    floats = [v.name or "" for v in training.inputs if v.dtype is not None and v.dtype.is_floating_point()]
    way = match(data.columns, inputs, config.columns, floats if len(training.steps) > 1 else ())
    if labels is not None:
        if config.classes:  # as they were when the run was started, for example
            data = in_classes(data, way[labels.name], tuple(config.classes), "the configuration of the run")
            way = match(data.columns, inputs, config.columns)
        check_classes(way[labels.name].classes, labels)
    whole = _Part(data, way, source=config.data)
    if config.folds is not None and config.fold is not None:
        strata = strata_of(data, way, labels, config.stratify)
        others, one = fold(data, config.fold, config.folds, config.seed or 0, strata)
        return whole, _Part(others, way), _Part(one, way)
    if isinstance(config.validation, float):
        strata = strata_of(data, way, labels, config.stratify)
        rest, share = split(data, config.validation, config.seed or 0, strata)
        return whole, _Part(rest, way), _Part(share, way)
    if config.validation is None:
        return whole, whole, None
    return whole, whole, _match_alike(open_data(config.validation, images=images), inputs, config, way)


def _match_alike(
    held_out: Dataset | Stream, inputs: Mapping[str, ir.Value], config: Config, training: Mapping[str, Binding]
) -> _Part:
    """Validation data, matched as the training data are: the same columns, if they are there, and the same classes."""
    same: dict[str, Any] = {name: list(binding.columns) for name, binding in training.items()}
    if not all(column in held_out.columns for columns in same.values() for column in columns):
        same = dict(config.columns)
    notes = []
    for name, binding in match(held_out.columns, inputs, same).items():
        classes = training[name].classes
        held_out = in_classes(held_out, binding, classes, "the training data")
        if missing := [one for one in classes or () if one not in (binding.classes or classes or ())]:
            notes.append(f"the validation data have no {list_names(missing, 3)}")
    return _Part(held_out, match(held_out.columns, inputs, same), tuple(notes), config.validation)


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluate(engine: Engine, batches: Iterable[tuple[Batch, int]], measures: Measures) -> dict[str, float]:
    """The metrics of a model over batches, of which so many samples count; the loss is the mean over samples."""
    metrics = measures.make()
    total, count = 0.0, 0
    for whole, samples in batches:
        batch = _padded_with_last(whole, samples)
        results = engine.evaluate(batch)
        if engine.loss not in results:
            raise UnsupportedError(
                "the loss of this model cannot be computed without training: it depends on random numbers or gradients",
                hint="train without validation data",
            )
        total, count = total + _sum_of_losses(engine, batch, samples, float(results[engine.loss])), count + samples
        if samples < engine.group.size and not engine.group.is_first:
            continue  # all have the same samples
        for metric in metrics.values():
            assert measures.output is not None and measures.target is not None
            predictions = results[measures.output][:samples]
            if measures.axis != 1 and predictions.ndim > 1:
                predictions = np.moveaxis(predictions, measures.axis, 1)
            metric.add(predictions, measures.countable(batch[measures.target][:samples]))
    for name, metric in metrics.items():
        of_all = engine.group.gather(metric)
        metrics[name] = functools.reduce(_merge, of_all)
    loss = total / count if count else math.nan
    found = {"loss": loss} | {name: metric.result() for name, metric in metrics.items()}
    if OF_LOSS in measures.names:
        found[OF_LOSS] = math.exp(loss) if loss < 700 else math.inf
    return {name: found[name] for name in ("loss", *measures.names)}


def _padded_with_last(batch: Batch, samples: int) -> Batch:
    """The batch, with copies of its last sample in the place of others that do not count."""
    if samples == samples_in(batch):
        return batch
    return {name: array[np.minimum(np.arange(len(array)), samples - 1)] for name, array in batch.items()}


def _sum_of_losses(engine: Engine, batch: Batch, samples: int, mean: float) -> float:
    """The sum of the losses of the samples that count. What the copies of the last one add, a batch of them tells."""
    size = samples_in(batch)
    if samples == size:
        return mean * samples
    copies = {name: array[np.full(size, samples - 1)] for name, array in batch.items()}
    return mean * size - float(engine.evaluate(copies)[engine.loss]) * (size - samples)


def _merge(one: Metric, other: Metric) -> Metric:
    one.merge(other)
    return one


def samples_in(batch: Batch) -> int:
    """How many samples a batch has, in all processes together."""
    if isinstance(batch, Portion):
        return batch.whole
    return max((len(array) for array in batch.values() if array.ndim), default=1)


@contextlib.contextmanager
def using_averages(engine: Engine) -> Iterator[None]:
    """Within it, parameters are their moving averages, where training keeps such: those are what is exported."""
    averages = {s.parameter: s.name for s in engine.states() if s.role == "ema" and s.parameter}
    if not averages:
        yield
        return
    state = engine.state()
    engine.load_state({name: state[average].astype(state[name].dtype) for name, average in averages.items()})
    try:
        yield
    finally:
        engine.load_state({name: state[name] for name in averages})
