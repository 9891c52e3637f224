"""Data in two parts, to train on and to validate with: at random, or with the same share of every class."""

from __future__ import annotations

import numpy as np

from onward.errors import DataError
from onward.training.data.dataset import Dataset
from onward.training.data.order import Order
from onward.training.data.streams import Stream
from onward.training.data.views import Subset


def split(
    data: Dataset | Stream, fraction: float, seed: int = 0, strata: np.ndarray | None = None
) -> tuple[Dataset, Dataset]:
    """The data in two parts, to train on and to validate with; `fraction` is the second's share. Both have rows.

    `strata` are a number for each row, such as its class: of each number the second part has that share of rows.
    """
    if isinstance(data, Stream):
        raise DataError("a stream of batches cannot be split", hint="give validation data of their own")
    if not 0 < fraction < 1:
        raise DataError(f"a validation split of {fraction} leaves nothing", hint="use a fraction between 0 and 1")
    count = len(data)
    if count < 2:
        raise DataError("one row cannot be split in two", hint="give validation data of their own")
    held_out = min(max(round(count * fraction), 1), count - 1)
    order = Order(count, seed, _SPLIT)
    if strata is None:
        first = Subset(data, count - held_out, lambda rows: order(rows + held_out))
        return first, Subset(data, held_out, order)
    is_held_out = _stratified_rows(strata, held_out, order)
    parts = [np.flatnonzero(chosen) for chosen in (~is_held_out, is_held_out)]
    first, second = (Subset(data, len(rows), rows.__getitem__) for rows in parts)
    return first, second


_SPLIT = 2**64 - 1  # takes the place of the epoch, which is never that large


def _stratified_rows(strata: np.ndarray, held_out: int, order: Order) -> np.ndarray:
    """Which rows to keep apart: so many in all, of each stratum its share, and those that come first in the order."""
    _, numbers, counts = np.unique(strata, return_inverse=True, return_counts=True)
    shares = counts * (held_out / len(strata))
    quotas = np.floor(shares).astype(np.int64)
    largest_rest = np.argsort(quotas - shares, kind="stable")
    quotas[largest_rest[: held_out - quotas.sum()]] += 1
    shuffled = order(np.arange(len(strata)))
    by_stratum = shuffled[np.argsort(numbers[shuffled], kind="stable")]
    starts = np.cumsum(counts) - counts
    rank = np.arange(len(strata)) - np.repeat(starts, counts)
    chosen = np.zeros(len(strata), bool)
    chosen[by_stratum[rank < np.repeat(quotas, counts)]] = True
    return chosen
