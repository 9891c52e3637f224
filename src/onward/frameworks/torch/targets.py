"""Targets to try a loss with, where the user gave none."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import torch

from onward.run_state.reading import LossTerm

_LABELS = 2
"""How many a sequence has, for CTC."""


def drawn_targets(
    rng: np.random.Generator,
    term: LossTerm,
    prediction: torch.Tensor,
    inputs: Mapping[str, ir.Value],
    sizes: Mapping[str, int],
) -> dict[str, np.ndarray]:
    """Classes, or numbers from 0 to 1, which are probabilities and variances if need be."""
    if term.name == "ctc":
        return _sequences(rng, term, prediction)
    axis = term.options.get("axis", 1)
    classes = prediction.shape[axis] if prediction.ndim > 1 else 2
    return {name: _draw_target(rng, inputs[name], sizes, classes) for name in term.inputs}


def _draw_target(rng: np.random.Generator, target: ir.Value, sizes: Mapping[str, int], classes: int) -> np.ndarray:
    assert target.shape is not None and target.dtype is not None
    shape = [size if isinstance(size, int) else sizes.get(str(size), 1) for size in target.shape]
    drawn = rng.random(shape) if target.dtype.is_floating_point() else rng.integers(0, classes, shape)
    return drawn.astype(target.dtype.numpy())


def _sequences(rng: np.random.Generator, term: LossTerm, prediction: torch.Tensor) -> dict[str, np.ndarray]:
    """Labels that are not blank, of sequences that are as long as they can be."""
    batch, time = prediction.shape[:2] if term.options.get("batch_first") else (prediction.shape[1], len(prediction))
    blank, classes = term.options.get("blank", 0), prediction.shape[2]
    labels = (blank + rng.integers(1, classes, (batch, _LABELS))) % classes
    arrays = labels, np.full(batch, time), np.full(batch, _LABELS)
    return dict(zip(term.inputs, arrays, strict=True))
