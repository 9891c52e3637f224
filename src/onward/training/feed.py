"""The batches of a run: for training, and to validate with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from onward.errors import DataError, UnsupportedError
from onward.model import Model
from onward.run import Engine
from onward.training.config import Config, Last
from onward.training.data import Batches, Binding, Dataset, Stream, match, open_data, split, with_classes
from onward.training.data.samples import Samples
from onward.training.objective import objectives

_FEW = 1_000_000
"""Rows that are split with the same share of every class by themselves; of more, chance does not make a difference."""


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


@dataclasses.dataclass(frozen=True)
class _Labels:
    """An input that holds classes by number."""

    name: str
    count: int
    ignored: int | None
    """The number that means none."""


def feeds(engine: Engine, config: Config, opened: Dataset | Stream | None = None) -> Feed:
    """Open the data of a run, unless they are `opened`, and match them with the model."""
    data = open_data(config.data, inputs=engine.inputs) if opened is None else opened
    labels = _labels(engine.model)
    matched = match(data.columns, engine.inputs, config.columns)
    if config.classes is not None and labels is not None:  # as they were when the run was started
        data = _in_classes(data, matched[labels.name], tuple(config.classes), "the data that the run was started with")
        matched = match(data.columns, engine.inputs, config.columns)
    classes = _check_classes(matched[labels.name].classes, labels) if labels is not None else None
    notes = dict.fromkeys(binding.note for binding in matched.values() if binding.note)
    held_out: Dataset | Stream | None = None
    held_out_matched = matched
    if isinstance(config.validation, float):
        strata = _strata(data, matched, labels, config.stratify)
        data, held_out = split(data, config.validation, config.seed, strata)
    elif config.validation is not None:
        held_out = open_data(config.validation, inputs=engine.inputs)
        held_out, held_out_matched = _matched_alike(held_out, engine, config, matched)

    def batches(source: Dataset | Stream, way: Mapping[str, Binding], shuffle: bool, last: Last) -> Batches:
        return Batches(
            source,
            way,
            size=config.batch_size,
            shuffle=shuffle,
            seed=config.seed,
            last=last,
            classes={labels.name: labels.count} if labels is not None else None,
            ignore=labels.ignored if labels is not None else None,
        )

    fixed = _fixed_size(engine)
    if fixed is not None and fixed != config.batch_size and isinstance(data, Dataset):
        raise DataError(
            f"the model takes batches of {fixed}, not of {config.batch_size}",
            hint=f"use `batch_size={fixed}` (`--batch-size {fixed}`)",
        )
    last: Last = "drop" if fixed is not None and config.last == "keep" else config.last
    training = batches(data, matched, config.shuffle, last)
    if last != config.last and isinstance(data, Dataset) and (rest := len(data) % config.batch_size):
        what = f"{rest} rows of each epoch do not fill a batch of {fixed}, and are left out"
        notes[f"{what} (`last` says otherwise)"] = None
    validation = None
    if held_out is not None:
        validation = batches(held_out, held_out_matched, False, "keep" if fixed is None else "pad")
    return Feed(training, validation, list(notes), fixed, classes)


def _fixed_size(engine: Engine) -> int | None:
    """The only size of batch that a model takes."""
    shapes = [value.shape for value in engine.inputs.values()]
    sizes = [shape[0] for shape in shapes if shape is not None and len(shape) and isinstance(shape[0], int)]
    return sizes[0] if sizes else None


# ---- classes ---------------------------------------------------------------------------------------------------------


def _labels(training: Model) -> _Labels | None:
    shapes = {value.name: value.shape for value in training.graph.outputs}
    for loss in objectives(training):
        shape = shapes.get(loss.output)
        by_number = loss.name == "nll" or (loss.name == "cross_entropy" and "target" not in loss.options)
        if not by_number or loss.target is None or shape is None or len(shape) < 2:
            continue
        if isinstance(count := shape[loss.axis], int):
            return _Labels(loss.target, count, loss.options.get("ignore_index", -100))
    return None


def _check_classes(classes: tuple[str, ...] | None, labels: _Labels) -> tuple[str, ...] | None:
    if classes is not None and len(classes) > labels.count:
        raise DataError(
            f"the data have {len(classes)} classes, and the model tells {labels.count} apart",
            hint=f'give it a new last layer: `new_head="classes={len(classes)}"` (`--new-head classes={len(classes)}`)',
        )
    return classes


def _in_classes(
    data: Dataset | Stream, binding: Binding, classes: tuple[str, ...] | None, origin: str
) -> Dataset | Stream:
    """Data whose labels have the numbers that they have in `origin`."""
    theirs = data.columns[binding.columns[0]].classes
    if isinstance(data, Stream) or theirs == classes:
        return data
    if classes is None:
        raise DataError(
            f"column `{binding.columns[0]}` has names of classes, but numbers in {origin}",
            hint="write classes in the same way in both",
        )
    return with_classes(data, binding.columns[0], classes, origin)


def _matched_alike(
    held_out: Dataset | Stream, engine: Engine, config: Config, training: Mapping[str, Binding]
) -> tuple[Dataset | Stream, dict[str, Binding]]:
    """Validation data, matched as the training data are: the same columns, if they are there, and the same classes."""
    same = {name: list(binding.columns) for name, binding in training.items()}
    if not all(column in held_out.columns for columns in same.values() for column in columns):
        same = dict(config.columns)
    for name, binding in match(held_out.columns, engine.inputs, same).items():
        held_out = _in_classes(held_out, binding, training[name].classes, "the training data")
    return held_out, match(held_out.columns, engine.inputs, same)


# ---- stratified splits -----------------------------------------------------------------------------------------------


def _strata(
    data: Dataset | Stream, matched: Mapping[str, Binding], labels: _Labels | None, wanted: bool | None
) -> np.ndarray | None:
    """The class of each row, if every class is to have its share; None for a split at random.

    Unless it is said, that is so where labels are classes, and can be read without the samples they belong to.
    """
    if wanted is False or isinstance(data, Stream):
        return None
    binding = matched[labels.name] if labels is not None else None
    is_class_each = binding is not None and all(not data.columns[name].shape for name in binding.columns)
    if not is_class_each:
        if wanted:
            raise UnsupportedError(
                "a split with the same share of every class needs a class for each row, which the loss has not",
                hint="leave `stratify` out",
            )
        return None
    if wanted is None and (isinstance(data, Samples) or len(data) > _FEW):
        return None
    assert binding is not None
    return binding(data.take(np.arange(len(data)), list(binding.columns))).reshape(len(data))
