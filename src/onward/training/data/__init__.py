"""Training data: from files and objects of many formats to batches that fit a model.

    data = open_data("digits.npz")
    matched = match(data.columns, inputs)
    for batch in Batches(data, matched, size=32, seed=0).epoch(0):
        ...

Data may be larger than memory: large data are read row by row, in an order that is computed, not
stored.
"""

from onward.training.data.batches import Batches, Noise
from onward.training.data.dataset import Batch, Column, Dataset
from onward.training.data.identity import differences, identify, not_compared
from onward.training.data.images import ImageFormat, format_for
from onward.training.data.matching import Binding, columns_of, match
from onward.training.data.objects import Stream
from onward.training.data.sources import files_of, in_parts, open_data
from onward.training.data.views import fold, split, with_classes

__all__ = [
    "Batch",
    "Batches",
    "Binding",
    "Column",
    "Dataset",
    "ImageFormat",
    "Noise",
    "Stream",
    "columns_of",
    "differences",
    "files_of",
    "fold",
    "format_for",
    "identify",
    "in_parts",
    "match",
    "not_compared",
    "open_data",
    "split",
    "with_classes",
]
