"""Weights and batches of PyTorch in the layout of JAX and TensorFlow: channels last, matrices [in, out]."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from workloads import WEIGHTS, Batch


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Return the weights by their names in PyTorch."""
    with np.load(folder / WEIGHTS) as archive:
        arrays = {name: array for name, array in archive.items() if array.ndim}  # not the counters of BatchNorm2d
    return {name: np.ascontiguousarray(_moved(name, array)) for name, array in arrays.items()}


def _moved(name: str, array: np.ndarray) -> np.ndarray:
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    if array.shape == (120, 400):  # of LeNet, whose input is flattened from channels first
        return array.reshape(120, 16, 5, 5).transpose(2, 3, 1, 0).reshape(400, 120)
    if array.ndim == 2 and name not in ("tokens.weight", "positions"):
        return array.T
    return array


def to_channels_last(batch: Batch) -> Batch:
    x, labels = batch
    return (np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if x.ndim == 4 else x), labels
