"""Weights and batches of PyTorch, in the layout that JAX and TensorFlow like: channels last, matrices [in, out]."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from workloads import WEIGHTS, Batch


def weights(folder: Path) -> dict[str, np.ndarray]:
    """By their names in PyTorch."""
    with np.load(folder / WEIGHTS) as given:
        arrays = {name: array for name, array in given.items() if array.ndim}  # not the counters of BatchNorm2d
    return {name: np.ascontiguousarray(_moved(name, array)) for name, array in arrays.items()}


def _moved(name: str, array: np.ndarray) -> np.ndarray:
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    if array.shape == (120, 400):  # of LeNet: what it reads was flattened with the channels first
        return array.reshape(120, 16, 5, 5).transpose(2, 3, 1, 0).reshape(400, 120)
    if array.ndim == 2 and name not in ("tokens.weight", "positions"):
        return array.T
    return array


def batch(given: Batch) -> Batch:
    x, labels = given
    return (np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if x.ndim == 4 else x), labels
