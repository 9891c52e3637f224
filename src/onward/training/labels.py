"""Labels that are classes: what numbers stand for, and shares of every class."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onward.errors import DataError, UnsupportedError
from onward.recipe.measures import Labels
from onward.training.data import Binding, Dataset, Stream, with_classes
from onward.training.data.objects import Samples

_FEW = 1_000_000
"""Rows that are split with the same share of every class by themselves; of more, chance does not make a difference."""


def check_classes(classes: tuple[str, ...] | None, labels: Labels) -> None:
    """Refuse data with more classes than the model knows."""
    if classes is not None and len(classes) > labels.count:
        raise DataError(
            f"the data have {len(classes)} classes, and the model tells {labels.count} apart",
            hint=f'give it a new last layer: `new_head="classes={len(classes)}"` (`--new-head classes={len(classes)}`)',
        )


def too_few_classes(data: Dataset | Stream, matched: Mapping[str, Binding], labels: Labels | None) -> str | None:
    """What to say where the model tells more classes apart than the data have: its head was made for something else."""
    if labels is None:
        return None
    names = matched[labels.name].classes
    if names is not None:
        count, enough = len(names), labels.count
    elif (numbers := _numbers(data, matched[labels.name])) is not None:
        count, enough = int(numbers.max(initial=-1)) + 1, labels.count // 2 + 1  # some may be missing by chance
    else:
        return None
    if not 0 < count < enough:
        return None
    return (
        f"the model tells {labels.count} classes apart, and the data have {count}: a last layer for these is "
        f'`new_head="classes={count}"` (`--new-head classes={count}`)'
    )


def in_classes(
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


def strata_of(
    data: Dataset | Stream, matched: Mapping[str, Binding], labels: Labels | None, wanted: bool | None
) -> np.ndarray | None:
    """The class of each row, if every class is to have its share; None for a split at random.

    Unless it is said, that is so where labels are classes, and can be read without the samples they belong to.
    """
    if wanted is False or isinstance(data, Stream):
        return None
    binding = matched[labels.name] if labels is not None else None
    if binding is None or not _is_class_each(data, binding):
        if wanted:
            raise UnsupportedError(
                "a split with the same share of every class needs a class for each row, which the loss has not",
                hint="leave `stratify` out",
            )
        return None
    return _numbers(data, binding, at_any_cost=wanted is True)


def _is_class_each(data: Dataset, binding: Binding) -> bool:
    return all(not data.columns[name].shape for name in binding.columns)


def _numbers(data: Dataset | Stream, binding: Binding, at_any_cost: bool = False) -> np.ndarray | None:
    """The class of each row, if that is to be had without much ado."""
    if isinstance(data, Stream) or not _is_class_each(data, binding):
        return None
    if not at_any_cost and (isinstance(data, Samples) or len(data) > _FEW):
        return None
    return binding(data.take(np.arange(len(data)), list(binding.columns))).reshape(len(data))
