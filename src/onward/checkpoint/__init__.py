"""Checkpoints of other frameworks, read and written as data: nothing in them is executed."""

from onward.checkpoint.comparison import Comparison, diff
from onward.checkpoint.exporting import to_checkpoint
from onward.checkpoint.format import Checkpoint
from onward.checkpoint.formats import is_checkpoint, open_checkpoint
from onward.run_state.tensors import ScatteredTensor, StoredTensor, Tensor

__all__ = [
    "Checkpoint",
    "Comparison",
    "ScatteredTensor",
    "StoredTensor",
    "Tensor",
    "diff",
    "is_checkpoint",
    "open_checkpoint",
    "to_checkpoint",
]
