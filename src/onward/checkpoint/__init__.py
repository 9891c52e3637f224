"""Checkpoints of other frameworks, as data: what is in them, and nothing of it executed."""

from onward.checkpoint.description import Checkpoint, Group, Optimizer
from onward.checkpoint.opening import is_checkpoint, open_checkpoint
from onward.checkpoint.tensors import ScatteredTensor, StoredTensor

__all__ = [
    "Checkpoint",
    "Group",
    "Optimizer",
    "ScatteredTensor",
    "StoredTensor",
    "is_checkpoint",
    "open_checkpoint",
]
