"""The batches of a run: for training, and to validate with."""

from __future__ import annotations

import dataclasses

from onward.errors import DataError
from onward.model import Model
from onward.run import Engine
from onward.training.config import Config, Last
from onward.training.data import Batches, Dataset, Stream, match, open_data, split
from onward.training.objective import objectives


@dataclasses.dataclass(frozen=True)
class Feed:
    training: Batches
    validation: Batches | None
    notes: list[str]
    """What the user should know about them."""
    size: int | None = None
    """The only size of batch that the model takes."""


def feeds(engine: Engine, config: Config) -> Feed:
    """Open the data of a run, and match them with the model."""
    data: Dataset | Stream = open_data(config.data, inputs=engine.inputs)
    held_out: Dataset | Stream | None = None
    if isinstance(config.validation, float):
        data, held_out = split(data, config.validation, config.seed)
    elif config.validation is not None:
        held_out = open_data(config.validation, inputs=engine.inputs)
    labels, classes, ignored = _classes(engine.model)
    notes: dict[str, None] = {}

    def batches(source: Dataset | Stream, shuffle: bool, last: Last) -> Batches:
        matched = match(source.columns, engine.inputs, config.columns)
        notes.update((binding.note, None) for binding in matched.values() if binding.note)
        return Batches(
            source,
            matched,
            size=config.batch_size,
            shuffle=shuffle,
            seed=config.seed,
            last=last,
            classes={labels: classes} if labels is not None and classes is not None else None,
            ignore=ignored,
        )

    fixed = _fixed_size(engine)
    if fixed is None:
        training = batches(data, config.shuffle, config.last)
        return Feed(training, batches(held_out, False, "keep") if held_out is not None else None, list(notes))
    if fixed != config.batch_size and isinstance(data, Dataset):
        raise DataError(
            f"the model takes batches of {fixed}, not of {config.batch_size}",
            hint=f"use `batch_size={fixed}` (`--batch-size {fixed}`)",
        )
    last: Last = "drop" if config.last == "keep" else config.last
    training = batches(data, config.shuffle, last)
    if config.last == "keep" and isinstance(data, Dataset) and (rest := len(data) % fixed):
        notes[f"{rest} rows of each epoch do not fill a batch of {fixed}, and are left out (`last` says otherwise)"] = (
            None
        )
    return Feed(training, batches(held_out, False, "pad") if held_out is not None else None, list(notes), fixed)


def _fixed_size(engine: Engine) -> int | None:
    """The only size of batch that a model takes."""
    shapes = [value.shape for value in engine.inputs.values()]
    sizes = [shape[0] for shape in shapes if shape is not None and len(shape) and isinstance(shape[0], int)]
    return sizes[0] if sizes else None


def _classes(training: Model) -> tuple[str | None, int | None, int | None]:
    """The input that holds classes by number, how many there are, and the number that means none."""
    shapes = {value.name: value.shape for value in training.graph.outputs}
    for loss in objectives(training):
        shape = shapes.get(loss.output)
        by_number = loss.name == "nll" or (loss.name == "cross_entropy" and "target" not in loss.options)
        if by_number and shape is not None and len(shape) > 1 and isinstance(count := shape[loss.axis], int):
            return loss.target, count, loss.options.get("ignore_index", -100)
    return None, None, None
