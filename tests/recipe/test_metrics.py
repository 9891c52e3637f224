"""Metrics against scikit-learn, in any division into batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import sklearn.metrics as sk
from hypothesis import given, settings
from models import digits_mlp, small_transformer
from runs import QUIET, RECIPE, digits
from sklearn.calibration import calibration_curve

from onward.errors import RecipeError
from onward.recipe.metrics import METRICS, Metrics, make
from onward.training.api import train

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")

SEEDS = st.integers(0, 2**32 - 1)


def measured(
    spec: str, predictions: np.ndarray, targets: np.ndarray, rng: np.random.Generator, **options: Any
) -> float:
    """A metric, of batches that are cut anywhere."""
    metric = make(spec, **options)
    cuts = np.unique(rng.integers(0, len(targets), 3))
    for x, y in zip(np.split(predictions, cuts), np.split(targets, cuts), strict=True):
        if len(y):
            metric.add(x, y)
    return metric.result()


def case(seed: int, classes: int) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    """Logits with ties and labels, some of which are chosen often; each class is there."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, rng.integers(1, 40))])
    logits = np.round(rng.normal(size=(len(labels), classes)) + np.eye(classes)[labels], 1).astype(np.float32)
    logits += np.arange(classes, dtype=np.float32) * 1e-3  # no ties within a sample, where any choice is right
    return logits, labels, rng


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64))
    return powers / powers.sum(1, keepdims=True)


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """By its definition, with the bins of scikit-learn's `calibration_curve`."""
    shares, confidences = calibration_curve(right, confidence, n_bins=15)
    counts = np.histogram(confidence, bins=np.linspace(0, 1, 16))[0]
    return float(np.sum(np.abs(shares - confidences) * counts[counts > 0]) / len(right))


CLASSES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": lambda x, y: sk.accuracy_score(y, x.argmax(1)),
    "top_k:k=2": lambda x, y: sk.top_k_accuracy_score(y, x, k=2),
    "precision": lambda x, y: sk.precision_score(y, x.argmax(1), average="macro", zero_division=0),
    "recall": lambda x, y: sk.recall_score(y, x.argmax(1), average="macro", zero_division=0),
    "f1": lambda x, y: sk.f1_score(y, x.argmax(1), average="macro", zero_division=0),
    "auc": lambda x, y: sk.roc_auc_score(y, softmax(x), multi_class="ovr"),
    "pr_auc": lambda x, y: sk.average_precision_score(y, softmax(x)),
    "balanced_accuracy": lambda x, y: sk.balanced_accuracy_score(y, x.argmax(1)),
    "mcc": lambda x, y: sk.matthews_corrcoef(y, x.argmax(1)),
    "iou": lambda x, y: sk.jaccard_score(y, x.argmax(1), average="macro", zero_division=0),
    "dice": lambda x, y: sk.f1_score(y, x.argmax(1), average="macro", zero_division=0),
    "log_loss": lambda x, y: sk.log_loss(y, softmax(x)),
    "ece": lambda x, y: calibration_error(softmax(x).max(1), x.argmax(1) == y),
}


@pytest.mark.parametrize("name", CLASSES)
@settings(max_examples=30)
@given(seed=SEEDS, classes=st.integers(3, 6))
def test_several_classes(name: str, seed: int, classes: int) -> None:
    logits, labels, rng = case(seed, classes)
    assert measured(name, logits, labels, rng) == pytest.approx(CLASSES[name](logits, labels))
    if name != "top_k:k=2":  # targets may be probabilities as well, and scores, too
        assert measured(name, logits, np.eye(classes)[labels], rng) == pytest.approx(CLASSES[name](logits, labels))
        assert measured(name, softmax(logits), labels, rng) == pytest.approx(CLASSES[name](logits, labels))


DECISIONS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": lambda x, y: sk.accuracy_score(y, x > 0),
    "precision": lambda x, y: sk.precision_score(y, x > 0, zero_division=0),
    "recall": lambda x, y: sk.recall_score(y, x > 0, zero_division=0),
    "f1": lambda x, y: sk.f1_score(y, x > 0, zero_division=0),
    "auc": lambda x, y: sk.roc_auc_score(y, x),
    "pr_auc": lambda x, y: sk.average_precision_score(y, x),
    "balanced_accuracy": lambda x, y: sk.balanced_accuracy_score(y, x > 0),
    "mcc": lambda x, y: sk.matthews_corrcoef(y, x > 0),
}


@pytest.mark.parametrize("name", DECISIONS)
@settings(max_examples=30)
@given(seed=SEEDS)
def test_two_classes(name: str, seed: int) -> None:
    logits, labels, rng = case(seed, 2)
    logits = logits.astype(np.float64)
    difference = logits[:, 1:] - logits[:, :1]
    wanted = pytest.approx(DECISIONS[name](difference[:, 0], labels))
    assert measured(name, logits, labels, rng) == wanted
    assert measured(name, difference, labels.astype(np.float32), rng) == wanted
    assert measured(name, difference[:, 0], labels.reshape(-1, 1), rng) == wanted
    chances = 1 / (1 + np.exp(-difference))
    assert measured(name, chances, labels, rng, threshold=0.5) == wanted


@settings(max_examples=30)
@given(seed=SEEDS)
def test_several_decisions_per_sample(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(20, 3))
    wanted = np.vstack([np.eye(3), np.zeros((1, 3)), rng.integers(0, 2, (16, 3))])
    assert measured("accuracy", scores, wanted, rng, threshold=0.0) == pytest.approx(np.mean((scores > 0) == wanted))
    assert measured("f1", scores, wanted, rng, threshold=0.0) == pytest.approx(
        sk.f1_score(wanted.reshape(-1), scores.reshape(-1) > 0, zero_division=0)
    )
    assert measured("auc", scores, wanted, rng, threshold=0.0) == pytest.approx(sk.roc_auc_score(wanted, scores))


@settings(max_examples=30)
@given(seed=SEEDS)
def test_probabilities_of_decisions(seed: int) -> None:
    logits, labels, rng = case(seed, 2)
    logits = (logits[:, 1] - logits[:, 0]).astype(np.float64)
    chances, kinds = 1 / (1 + np.exp(-logits)), ({"scores": "logits"}, {"scores": "probabilities"})
    for scores, kind in zip((logits, chances), kinds, strict=True):
        assert measured("log_loss", scores, labels, rng, **kind) == pytest.approx(sk.log_loss(labels, chances))
        wanted = pytest.approx(calibration_error(chances, labels))
        assert measured("ece", scores, labels, rng, **kind) == wanted
        metric = make("pr_auc", threshold=0.0)
        metric.add(scores, labels)
        precision, recall, thresholds = sk.precision_recall_curve(labels, chances)
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
        threshold, best = metric.best_threshold(kind["scores"])  # type: ignore[attr-defined]
        assert best == pytest.approx(f1.max())
        assert sk.f1_score(labels, chances >= threshold - 1e-12) == pytest.approx(best)
        assert np.isclose(thresholds, threshold).any()


@settings(max_examples=30)
@given(seed=SEEDS, classes=st.integers(2, 5))
def test_metrics_that_share_sums(seed: int, classes: int) -> None:
    """Together they are what each is alone; classes that no label has, and ignored labels, do not matter."""
    logits, labels, rng = case(seed, classes)
    logits = np.hstack([logits, np.full((len(logits), 1), -9, np.float32)])
    labels = np.where(rng.random(len(labels)) < 0.2, -1, labels)
    labels[0] = 0
    names = ["accuracy", "f1", "precision", "recall", "mcc", "balanced_accuracy", "auc", "pr_auc", "log_loss", "ece"]
    together = Metrics(names)
    for x, y in zip(np.array_split(logits, 3), np.array_split(labels, 3), strict=True):
        together.add(x, y)
    alone = {name: measured(name, logits, labels, rng) for name in names}
    assert together.results() == pytest.approx(alone, nan_ok=True)
    kept = labels >= 0
    assert alone["mcc"] == pytest.approx(sk.matthews_corrcoef(labels[kept], logits[kept].argmax(1)))


def test_what_would_keep_too_much_is_dropped() -> None:
    metrics = Metrics(["accuracy", "auc", "pr_auc"], most=50)
    for _ in range(3):
        metrics.add(np.eye(5), np.arange(5))
    assert metrics.dropped == ["auc", "pr_auc"] and metrics.results() == {"accuracy": 1}


AMOUNTS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "mse": sk.mean_squared_error,
    "mape": lambda x, y: sk.mean_absolute_percentage_error(y, x),
    "median_error": lambda x, y: sk.median_absolute_error(y, x),
    "mae": lambda x, y: sk.mean_absolute_error(y, x),
    "rmse": lambda x, y: math.sqrt(sk.mean_squared_error(y, x)),
    "r2": lambda x, y: sk.r2_score(y, x),
}


@pytest.mark.parametrize("name", AMOUNTS)
@settings(max_examples=30)
@given(seed=SEEDS, columns=st.integers(1, 3), offset=st.sampled_from([0.0, 1e6]), constant=st.booleans())
def test_amounts(name: str, seed: int, columns: int, offset: float, constant: bool) -> None:
    rng = np.random.default_rng(seed)
    targets = rng.normal(size=(rng.integers(2, 40), columns)) + offset
    if constant:
        targets[:, 0] = offset
    predictions = targets + rng.normal(size=targets.shape)
    assert measured(name, predictions, targets, rng) == pytest.approx(AMOUNTS[name](predictions, targets), rel=1e-7)
    if columns == 1:
        wanted = pytest.approx(measured(name, predictions, targets, rng))
        assert measured(name, predictions, targets[:, 0], rng) == wanted


def test_sequences_and_what_does_not_count() -> None:
    logits = np.random.default_rng(0).normal(size=(4, 5, 7))  # samples, classes, places
    labels = logits.argmax(1)
    labels[0, :2] = (labels[0, :2] + 1) % 5
    labels[1, :] = -100
    rng = np.random.default_rng(1)
    assert measured("accuracy", logits, labels, rng) == pytest.approx(19 / 21)
    assert measured("top_k:k=5", logits, labels, rng) == 1
    flat, kept = np.moveaxis(logits, 1, 2).reshape(-1, 5), labels.reshape(-1) >= 0
    wanted = sk.f1_score(labels.reshape(-1)[kept], flat.argmax(1)[kept], average="macro")
    assert measured("f1", logits, labels, rng) == pytest.approx(wanted)


@pytest.mark.parametrize("name", METRICS)
def test_nothing(name: str) -> None:
    assert math.isnan(make(name).result())


# ---- in runs ---------------------------------------------------------------------------------------------------------


def test_perplexity(tmp_path: Any) -> None:
    tokens = np.random.default_rng(0).integers(0, 32, (8, 6))
    data = {"tokens": tokens, "labels": np.roll(tokens, -1, 1)}
    options: dict[str, Any] = {"loss": "value:loss", "metrics": "perplexity", "quiet": True}
    run = train(small_transformer(1), data, validation=data, run=tmp_path / "run", **options)
    assert run.read_results()["perplexity"] == pytest.approx(math.exp(run.read_results()["loss"]))
    values = [event["perplexity"] for event in run.read_log() if event["event"] == "validation"]
    assert values[1] < values[0]
    best = [event["step"] for event in run.read_log() if event["event"] == "save" and event["best"]]
    assert best == [0, 1]  # less is better


@pytest.mark.parametrize("loss", ["bce_with_logits", "ce:target=probabilities"])
def test_what_suits_the_loss(loss: str, tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    images, wanted = rng.normal(size=(40, 64)).astype(np.float32), np.eye(10, dtype=np.float32)[rng.integers(0, 10, 40)]
    run = train(
        digits_mlp(), (images, wanted), validation=(images, wanted), run=tmp_path / "run", loss=loss, quiet=True
    )
    import onnxruntime as ort

    logits = ort.InferenceSession(run.load_last().to_proto().SerializeToString()).run(None, {"image": images})[0]
    right = (logits > 0) == (wanted > 0.5) if loss.startswith("bce") else logits.argmax(1) == wanted.argmax(1)
    assert run.read_results()["accuracy"] == pytest.approx(np.mean(right))


def test_what_is_monitored_is_measured(tmp_path: Any) -> None:
    data = digits()
    run = train(digits_mlp(), data, validation=0.25, monitor="f1", run=tmp_path / "run", **RECIPE, **QUIET)
    assert list(run.read_results()) == ["loss", "accuracy", "f1"] and run.read_config()["metrics"] == ["accuracy", "f1"]


def test_labels_that_are_ignored_do_not_count(tmp_path: Any) -> None:
    """Whatever the number that means none, also one that is larger than those of classes."""
    data, recipe = digits(), {**RECIPE, "optimizer": "sgd:lr=0"}
    kept = {name: array[::2] for name, array in data.items()}
    ignored = {**data, "labels": np.where(np.arange(96) % 2, 255, data["labels"])}
    recipe["loss"] = "ce:ignore_index=255"
    metrics = ["accuracy", "top_k:k=2", "f1", "auc"]
    runs = [
        train(digits_mlp(), data, validation=part, metrics=metrics, run=tmp_path / name, **recipe, **QUIET).results
        for name, part in {"kept": kept, "ignored": ignored}.items()
    ]
    assert {name: runs[0][name] for name in metrics} == {name: runs[1][name] for name in metrics}


def test_shapes_that_do_not_go_together() -> None:
    for name, predictions, targets in [("mae", (4, 3), (4,)), ("accuracy", (4, 3), (4, 2)), ("r2", (4, 2), (2, 4))]:
        with pytest.raises(RecipeError, match="predictions and targets of a metric differ in shape"):
            make(name).add(np.zeros(predictions), np.zeros(targets, np.int64))
