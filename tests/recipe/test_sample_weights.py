"""Weights of samples, against PyTorch and Keras."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from marks import needs
from models import digits_mlp

import onward
from onward.engines import start
from onward.errors import Error

RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.normal(size=(12, 64)).astype(np.float32), RNG.integers(0, 10, 12)
WEIGHTS, VALUES = RNG.uniform(0, 3, 12).astype(np.float32), RNG.uniform(0.05, 0.95, (12, 10)).astype(np.float32)
NAMES = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


def batch(training: onward.Model) -> dict[str, np.ndarray]:
    known = {"image": IMAGES, "labels": LABELS, "weight": WEIGHTS}
    names = [value.name or "" for value in (*training.inputs, *training.step().algorithm.inputs)]
    return {name: known.get(name, VALUES) for name in names}


@needs("torch")
@pytest.mark.parametrize("by", ["count", "weights"])
@pytest.mark.parametrize(
    ("loss", "function"),
    [
        ("cross_entropy:label_smoothing=0.1", "cross_entropy"),
        ("mse", "mse_loss"),
        ("bce_with_logits", "binary_cross_entropy_with_logits"),
        ("huber", "huber_loss"),
        ("kl_div", "kl_div"),
    ],
)
def test_losses_and_gradients_are_those_of_pytorch(loss, function, by):
    import torch

    training = onward.prepare(digits_mlp(), loss=loss, optimizer="sgd:lr=0.1", sample_weight=f"weight:by={by}")
    assert not onward.check(training)
    tensors = [torch.tensor(training.array(name), requires_grad=True) for name in NAMES]
    hidden = torch.relu(torch.nn.functional.linear(torch.tensor(IMAGES), *tensors[:2]))
    target = torch.tensor(LABELS if loss.startswith("cross") else VALUES)
    options = {"label_smoothing": 0.1} if loss.startswith("cross") else {}
    logits = torch.nn.functional.linear(hidden, *tensors[2:])
    each = getattr(torch.nn.functional, function)(logits, target, reduction="none", **options).reshape(12, -1)
    each = each.sum(1) if loss == "kl_div" else each.mean(1)  # whose mean is over the batch alone
    expected = (each * torch.tensor(WEIGHTS)).sum() / (12 if by == "count" else float(WEIGHTS.sum()))
    gradients = torch.autograd.grad(expected, tensors)
    with start(training) as engine:
        for name, gradient in zip(NAMES, gradients, strict=True):
            found = engine.gradients(batch(training))[name]
            np.testing.assert_allclose(found, gradient.numpy(), rtol=1e-4, atol=1e-6)
        assert float(engine.step(batch(training))["loss"]) == pytest.approx(expected.item(), rel=1e-5)


@needs("keras")
@pytest.mark.parametrize(
    ("by", "reduction"), [("count", "sum_over_batch_size"), ("weights", "mean_with_sample_weight")]
)
def test_a_step_is_that_of_keras(by, reduction):
    import keras

    model = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model.compile(keras.optimizers.SGD(0.1), loss)
    model.build((None, 64))
    training = onward.prepare(digits_mlp(), loss="ce", optimizer="sgd:lr=0.1", sample_weight=f"weight:by={by}")
    model.set_weights([training.array(name).T for name in NAMES])
    with start(training) as engine:
        for _ in range(3):
            expected = float(loss(LABELS, model(IMAGES), sample_weight=WEIGHTS))
            assert float(engine.step(batch(training))["loss"]) == pytest.approx(expected, rel=1e-5)
            model.train_on_batch(IMAGES, LABELS, sample_weight=WEIGHTS)
        for name, array in zip(NAMES, model.get_weights(), strict=True):
            np.testing.assert_allclose(engine.state()[name], array.T, rtol=1e-4, atol=1e-5)


def test_a_run_takes_weights_from_a_column(tmp_path):
    """A sample that weighs nothing is as if it were not there, also on validation data."""
    data = {"image": IMAGES, "labels": LABELS, "w": np.repeat([1.0, 0.0], 6)}
    settings: dict[str, Any] = {"loss": "ce", "optimizer": "sgd:lr=0.1", "batch_size": 12, "quiet": True, "epochs": 2}
    half = {name: array[:6] for name, array in data.items()}
    run = onward.train(
        digits_mlp(), data, sample_weight="w:by=weights", run=tmp_path / "a", validation=data, **settings
    )
    plain = {name: half[name] for name in ("image", "labels")}
    other = onward.train(digits_mlp(), plain, run=tmp_path / "b", validation=plain, **settings)
    assert run.results["loss"] == pytest.approx(other.results["loss"], rel=1e-5)
    np.testing.assert_allclose(run.best.array("fc1.weight"), other.best.array("fc1.weight"), rtol=1e-5, atol=1e-6)


def test_what_cannot_be_weighted_is_refused():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"loss": "value:logits"}, "the loss `value`, which has no value per sample"),
        ({"loss": "ce", "sample_weight": "fc1.weight"}, "`fc1.weight`, which is a name in the model"),
        ({"loss": "ce", "sample_weight": "w:by=luck"}, "`by` of `sample_weight` is `luck`"),
        ({"loss": "ce", "teacher": digits_mlp()}, "`sample_weight` does not work with `teacher`"),
    ]
    for options, message in cases:
        with pytest.raises(Error, match=message):
            onward.prepare(digits_mlp(), **{"sample_weight": "weight", **options})


@needs("torch")
def test_it_is_not_lost_on_the_way_to_a_framework():
    training = onward.prepare(digits_mlp(), loss="ce", optimizer="sgd:lr=0.1", sample_weight="weight")
    with pytest.raises(Error, match="it weights its samples"):
        onward.to_torch(training)
