"""Batches of a run, for training and validation, and the evaluation of metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.engines import Engine
from onward.engines.distributed import Portion
from onward.errors import DataError, UnsupportedError, list_names
from onward.model import Model
from onward.options import Last
from onward.recipe.description import Description
from onward.recipe.metrics import OF_LOSS, Labels, Measures, class_names, labels_of, objectives
from onward.recipe.quantize import calibrate, has_ranges, needs_calibration
from onward.training.config import Config
from onward.training.data import (
    Batch,
    Batches,
    Binding,
    Dataset,
    Noise,
    Stream,
    columns_of,
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
    """Calibrate the ranges of a new quantized model on the first batches. Return a note about it."""
    if engine.group.size > 1 and has_ranges(engine.model):
        raise UnsupportedError(
            "activation ranges cannot be calibrated in several processes",
            hint="train in one process, or quantize weights only: `quantize=int8:activations=none`",
        )
    count = needs_calibration(engine.model)
    if not count:
        return []
    batches = list(itertools.islice(feed.training.epoch(0), count))
    state = calibrate(engine.model, batches)
    for name, array in state.items():
        engine.model.set(name, array)
    engine.load_state(state)
    return [f"calibrated ranges on {len(batches)} batches"]


@dataclasses.dataclass(frozen=True)
class Feed:
    """Batches of a run."""

    training: Batches
    validation: Batches | None
    notes: list[str]
    """Notes for the user."""
    size: int | None = None
    """The only batch size of the model, if it is fixed."""
    classes: tuple[str, ...] | None = None
    """Class names of the labels."""
    columns: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Columns of each input and target."""
    sources: tuple[_Source, ...] = ()
    """The data before a split, and separate validation data, if any."""

    def identify(self) -> dict[str, Any]:
        """Return the facts by which `resume` recognizes the data."""
        facts = [identify(data.data, columns_of(data.bindings), files_of(data.source)) for data in self.sources]
        return dict(zip(("data", "validation"), facts, strict=False))


def describe_run(training: Model, feed: Feed, config: Config) -> None:
    """Write into a training model what its inference models say about themselves."""
    Description.of_training(
        training, feed.classes, feed.columns, config.recipe, keeps_preprocessing=config.keep_preprocessing
    ).write(training)


@dataclasses.dataclass(frozen=True)
class _Source:
    """Data, with the columns of each input."""

    data: Dataset | Stream
    bindings: Mapping[str, Binding]
    notes: tuple[str, ...] = ()
    source: Any = None
    """The argument that they were opened from."""


def open_feed(engine: Engine, config: Config, opened: Dataset | Stream | None = None) -> Feed:
    """Open the data of a run, unless `opened`, and match them with the model."""
    labels = labels_of(engine.model)
    fixed = check_batch_axis(engine.of_a_batch, engine.model.inputs, processes=engine.group.size)
    noise = Noise(config.noise, engine.of_a_batch, config.seed or 0)
    inputs = {name: value for name, value in engine.of_a_batch.items() if name not in config.noise}
    whole, train_source, held_out = _parts(engine.model, inputs, config, opened, labels)
    notes = dict.fromkeys(binding.note for binding in train_source.bindings.values() if binding.note)
    notes |= dict.fromkeys(_matches(train_source.bindings))
    if few := too_few_classes(train_source.data, train_source.bindings, labels):
        notes[few] = None
    notes |= dict.fromkeys(held_out.notes if held_out is not None else ())

    def batches(source: _Source, shuffle: bool, last: Last) -> Batches:
        return Batches(
            source.data,
            source.bindings,
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

    if isinstance(train_source.data, Dataset | SizedStream):
        check_batch_axis(engine.of_a_batch, engine.model.inputs, config.batch_size, engine.group.size)
    last: Last = "drop" if fixed is not None and config.last == "keep" else config.last
    training = batches(train_source, config.shuffle, last)
    if training.per_epoch is not None and training.per_epoch < engine.batches:
        raise DataError(
            f"the data make {training.per_epoch} batches, but the steps of a round need {engine.batches}",
            hint="use smaller batches: `batch_size=...` (`--batch-size`)",
        )
    rest = len(train_source.data) % config.batch_size if isinstance(train_source.data, Dataset) else 0
    if last != config.last and rest:
        note = f"{rest} rows of each epoch do not fill a batch of {fixed} and are dropped"
        notes[f"{note}; to fill the batch: `last=pad`"] = None
    if held_out is not None and fixed is not None and engine.group.size > 1:
        raise DataError(
            f"the last validation batch may be smaller than the fixed batch size {fixed // engine.group.size}",
            hint="export the model with a dynamic batch size, or train without validation data",
        )
    validation = batches(held_out, False, "keep" if fixed is None else "pad") if held_out is not None else None
    target = next((o.target for o in objectives(engine.model) if o.target in train_source.bindings), None)
    classes = train_source.bindings[target].classes if target is not None else None
    other = held_out if held_out is not None and held_out.source is not None else None
    sources = (whole,) if other is None else (whole, other)
    columns = {name: binding.columns for name, binding in train_source.bindings.items()}
    return Feed(training, validation, list(notes), fixed, classes, columns, sources)


_MOST_NAMES = 6


def _matches(bindings: Mapping[str, Binding]) -> Iterator[str]:
    """Yield the columns of inputs that stack several, and classes in the order of their numbers."""
    for name, binding in bindings.items():
        if len(binding.columns) > 1:
            yield f"columns of `{name}`: {list_names(binding.columns, _MOST_NAMES)}"
        if binding.classes is not None and binding.texts is None:
            yield f"classes of `{name}`: {list_names(binding.classes, _MOST_NAMES)}"


def _parts(
    training: Model,
    inputs: Mapping[str, ir.Value],
    config: Config,
    opened: Dataset | Stream | None,
    labels: Labels | None,
) -> tuple[_Source, _Source, _Source | None]:
    """Return all data, the training part and the validation part, if any."""
    images = format_for(inputs, single_pictures(training))
    data = open_data(config.data, images=images, window=config.window) if opened is None else opened
    # In a model with several steps, a float input that no column fits is the noise of a generator.
    floats = [v.name or "" for v in training.inputs if v.dtype is not None and v.dtype.is_floating_point()]
    class_targets = [loss.target for loss in objectives(training) if loss.target and loss.by_number and loss.axis == 1]
    noise_inputs = floats if len(training.steps) > 1 else ()
    targets = [loss.target for loss in objectives(training) if loss.target]
    bindings = match(data.columns, inputs, config.columns, noise_inputs, class_targets, targets)

    if labels is not None:
        classes, origin = tuple(config.classes or ()), "the configuration of the run"  # such as a resumed one
        if not classes and (theirs := bindings[labels.name].classes) is not None:
            says = Description.read(training).classes or ()
            classes = says if {*theirs} <= {*says} else class_names(training, labels.count)
            origin = "the model"
        if classes:
            data = in_classes(data, bindings[labels.name], classes, origin)
            bindings = match(data.columns, inputs, config.columns)
        check_classes(bindings[labels.name].classes, labels)
    whole = _Source(data, bindings, source=config.data)
    if config.folds is not None and config.fold is not None:
        strata = strata_of(data, bindings, labels, config.stratify)
        others, fold_rows = fold(data, config.fold, config.folds, config.seed or 0, strata)
        return whole, _Source(others, bindings), _Source(fold_rows, bindings)
    if isinstance(config.validation, float):
        strata = strata_of(data, bindings, labels, config.stratify)
        rest, share = split(data, config.validation, config.seed or 0, strata)
        return whole, _Source(rest, bindings), _Source(share, bindings)
    if config.validation is None:
        return whole, whole, None
    return whole, whole, _match_alike(open_data(config.validation, images=images), inputs, config, bindings)


def _match_alike(
    held_out: Dataset | Stream, inputs: Mapping[str, ir.Value], config: Config, training: Mapping[str, Binding]
) -> _Source:
    """Return validation data, matched like the training data, with the same classes."""
    same: dict[str, Any] = {name: list(binding.columns) for name, binding in training.items()}
    if not all(column in held_out.columns for columns in same.values() for column in columns):
        same = dict(config.columns)
    notes = []
    for name, binding in match(held_out.columns, inputs, same).items():
        classes = training[name].classes
        held_out = in_classes(held_out, binding, classes, "the training data")
        if missing := [label for label in classes or () if label not in (binding.classes or classes or ())]:
            notes.append(f"the validation data lack the classes {list_names(missing, 3)}")
    return _Source(held_out, match(held_out.columns, inputs, same), tuple(notes), config.validation)


# ---- evaluation ------------------------------------------------------------------------------------------------------


def outputs_of(
    compute: Callable[[Batch], Mapping[str, np.ndarray]], batches: Iterable[tuple[Batch, int]], size: int | None = None
) -> Iterator[tuple[Batch, Mapping[str, np.ndarray], int]]:
    """Yield each batch with its outputs, and the number of samples that count: the first ones.

    Batches come with that number. Padding, also to a fixed `size`, is copies of the last sample that counts.
    """
    for batch, samples in batches:
        filled = max(samples_in(batch), size or 0)
        if samples < filled:
            rows = np.minimum(np.arange(filled), samples - 1)
            batch = {name: array[rows] for name, array in batch.items()}
        yield batch, compute(batch), samples


def evaluate(engine: Engine, batches: Iterable[tuple[Batch, int]], measures: Measures) -> dict[str, float]:
    """Return the metrics of a model over batches, each with its number of samples that count.

    The loss is the mean over samples.
    """
    metrics = measures.make()
    total, count = 0.0, 0
    for batch, results, samples in outputs_of(engine.evaluate, batches):
        if engine.loss not in results:
            raise UnsupportedError(
                "cannot validate: the loss depends on random numbers or gradients", hint="train without validation data"
            )
        total, count = total + _sum_of_losses(engine, batch, samples, float(results[engine.loss])), count + samples
        if samples < engine.group.size and not engine.group.is_first:
            continue  # every process has the same samples
        if measures.output is not None and measures.target is not None:
            metrics.add(*measures.pairs(results, batch, samples))
    metrics.gather(engine.group.gather)
    loss = total / count if count else math.nan
    values = {"loss": loss} | metrics.results()
    if OF_LOSS in measures.names:
        values[OF_LOSS] = math.exp(loss) if loss < 700 else math.inf  # exp overflows at 709
    return {name: values[name] for name in ("loss", *measures.names)}


def _sum_of_losses(engine: Engine, batch: Batch, samples: int, mean: float) -> float:
    """Return the sum of the losses of the samples that count.

    A batch of copies of the last sample gives the loss that padding adds.
    """
    size = samples_in(batch)
    if samples == size:
        return mean * samples
    copies = {name: array[np.full(size, samples - 1)] for name, array in batch.items()}
    return mean * size - float(engine.evaluate(copies)[engine.loss]) * (size - samples)


def samples_in(batch: Batch) -> int:
    """Return the number of samples of a batch in all processes together."""
    if isinstance(batch, Portion):
        return batch.whole
    return max((len(array) for array in batch.values() if array.ndim), default=1)


@contextlib.contextmanager
def using_averages(engine: Engine) -> Iterator[None]:
    """Use the moving averages of parameters inside, if training keeps them: those are exported."""
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
