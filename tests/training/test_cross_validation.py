"""Folds: a run for each, the same as by hand; gone on with after an interruption."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import pytest
from commands import failed, run
from models import digits_mlp

import onward
from onward.errors import DataError, Error
from onward.training.data import fold, open_data

RNG = np.random.default_rng(0)
DATA = {"image": RNG.normal(size=(67, 64)).astype(np.float32), "labels": RNG.integers(0, 10, 67)}
SETTINGS: dict[str, Any] = {"loss": "ce", "optimizer": "adam:lr=0.01", "epochs": 2, "batch_size": 16, "quiet": True}


def rows(part: Any) -> dict[str, np.ndarray]:
    return part.take(np.arange(len(part)))


@pytest.mark.parametrize("strata", [None, DATA["labels"]])
def test_each_row_is_in_one_fold_and_each_class_in_all(strata):
    data = {**DATA, "number": np.arange(67)}
    parts = [fold(open_data(data), number, 5, seed=3, strata=strata) for number in range(1, 6)]
    held = [rows(one)["number"] for _, one in parts]
    assert sorted(np.concatenate(held)) == list(range(67)) and {len(one) for one in held} == {13, 14}
    for others, one in parts:
        assert sorted([*rows(others)["number"], *rows(one)["number"]]) == list(range(67))
    if strata is not None:
        counts = np.array([np.bincount(DATA["labels"][one], minlength=10) for one in held])
        assert (np.ptp(counts, axis=0) <= 1).all()


def test_a_fold_is_the_run_that_one_would_make_by_hand(tmp_path):
    found = onward.cross_validate(digits_mlp(), DATA, folds=3, seed=5, run=tmp_path / "folds", **SETTINGS)
    for number, ours in enumerate(found.runs, start=1):
        others, one = fold(open_data(DATA), number, 3, 5, DATA["labels"])
        by_hand = onward.train(
            digits_mlp(), rows(others), validation=rows(one), seed=5, run=tmp_path / f"{number}", **SETTINGS
        )
        assert ours.results == by_hand.results
        np.testing.assert_array_equal(ours.last.array("fc1.weight"), by_hand.last.array("fc1.weight"))
    accuracies = [one["accuracy"] for one in found.results]
    assert found.mean["accuracy"] == pytest.approx(np.mean(accuracies))
    assert found.deviation["accuracy"] == pytest.approx(np.std(accuracies, ddof=1))


class Interrupt(onward.Callback):
    """Stops in the middle of the second fold, as Ctrl-C does."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, status: Any) -> None:
        self.steps += 1
        if self.steps == 8:
            status.stop("interrupted")


def test_what_is_missing_is_trained_as_if_nothing_had_happened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(digits_mlp(), "digits.onnx")
    np.savez("digits.npz", **DATA)
    settings = {**SETTINGS, "folds": 3}
    whole = onward.cross_validate("digits.onnx", "digits.npz", run="whole", **settings)
    part = onward.cross_validate("digits.onnx", "digits.npz", run="part", callbacks=[Interrupt()], **settings)
    assert len(part.runs) == 2 and not part.is_finished and len(part.results) == 1
    told = json.loads(run("train", "--resume", "part", "--json").stdout)
    assert [one["loss"] for one in told["folds"]] == [one["loss"] for one in whole.results]
    assert told["mean"] == whole.mean and onward.CrossValidation("part").is_finished
    assert "deviation" in run("train", "--resume", "whole").stdout


def test_what_does_not_go_together_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(digits_mlp(), "digits.onnx")
    np.savez("digits.npz", **DATA)
    command = ["train", "digits.onnx", "--data", "digits.npz", "--loss", "ce"]
    assert "no effect with folds" in failed(*command, "--folds", "3", "--validation", "0.2")[0]
    assert "no effect with --folds" in failed(*command, "--folds", "3", "-o", "x.onnx", code=2)[0]
    assert "fold 4 of 3 does not exist" in failed(*command, "--folds", "3", "--fold", "4")[0]
    assert "`fold` needs `folds`" in failed(*command, "--fold", "1")[0]
    assert "cannot divide 67 rows into 100 folds" in failed(*command, "--folds", "100", "--run", "many")[0]
    assert not (tmp_path / "many").exists()
    with pytest.raises(Error, match="`folds` needs `fold`") as caught:
        onward.train("digits.onnx", "digits.npz", loss="ce", folds=3)
    assert "onward.cross_validate" in caught.value.hint
    with pytest.raises(DataError, match="cannot divide a stream of batches into folds"):
        onward.cross_validate(digits_mlp(), [DATA].__iter__, folds=2, loss="ce", quiet=True)
    with pytest.raises(Error, match="holds no cross-validation"):
        onward.CrossValidation("digits").folds  # noqa: B018
