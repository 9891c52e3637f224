"""Entire training as one plain ONNX model: what `onward train` does, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onward
from models import digits_mlp, small_cnn, small_transformer
from runs import RECIPE, digits
from whole_runs import EARLY, FINISHED, NOT_FINITE, WholeRun, check_same, trained

CE = {"loss": "cross_entropy"}


def tokens(count: int) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(count).integers(0, 32, (count, 9))
    return {"tokens": drawn[:, :-1].copy(), "labels": drawn[:, 1:].copy()}


CASES: dict[str, Any] = {
    "mlp": (
        lambda: onward.prepare(
            digits_mlp(8), **CE, optimizer="adam:lr=1e-2", schedule="cosine:steps=12,warmup=2", accumulate=2, ema=0.9
        ),
        digits(90), digits(40, seed=1), {"batch_size": 16},
    ),
    "cnn with batch norm, dropout and augmentation": (
        lambda: onward.prepare(small_cnn(4), **CE, optimizer="momentum:lr=0.05", augment="flip crop:padding=1"),
        digits(70, flat=False), digits(33, flat=False, seed=1), {"batch_size": 20, "metrics": ["accuracy", "top_k:k=3"]},
    ),
    "gpt": (
        lambda: onward.prepare(
            small_transformer(1), loss="value:loss", optimizer="adamw:lr=1e-3,weight_decay=0.1",
            schedule="linear:steps=20,warmup=4", clip="norm:1",
        ),
        tokens(30), tokens(9), {"batch_size": 8, "metrics": ["perplexity"], "monitor": "loss"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_train_does(name: str, tmp_path: Path) -> None:
    make, data, held_out, options = CASES[name]
    training = make()
    whole = WholeRun(training, validation=True, **options)
    run = trained(training, data, tmp_path, validation=held_out, epochs=3, seed=5, **options)
    results = whole(data, 3, validation=held_out, seed=5)
    check_same(whole, results, run)
    assert results.outputs[whole.contract["stopped"]] == FINISHED
    pieces = whole.in_pieces(data, 3, 4, validation=held_out, seed=5)
    for output, array in results.outputs.items():
        np.testing.assert_array_equal(array, pieces.outputs[output], err_msg=output)
