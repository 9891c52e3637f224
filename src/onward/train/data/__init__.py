"""Data to train on: from files and objects of many kinds to batches that fit a model.

    data = open_data("digits.npz")
    matched = match(data.columns, inputs)
    for batch in Batches(data, matched, size=32, seed=0).epoch(0):
        ...

Data may be larger than memory: what is not small is read row by row, in an order that is computed and not stored.
"""

from onward.train.data.batches import Batches
from onward.train.data.dataset import Batch, Column, Dataset
from onward.train.data.fitting import Binding
from onward.train.data.images import ImageFormat
from onward.train.data.matching import match
from onward.train.data.sources import open_data
from onward.train.data.streams import Stream
from onward.train.data.views import split

__all__ = ["Batch", "Batches", "Binding", "Column", "Dataset", "ImageFormat", "Stream", "match", "open_data", "split"]
