"""Callbacks of users: what they are told, how they stop a run, and what becomes of it when they fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from runs import QUIET, RECIPE, state

import onward
from onward.errors import ArgumentError, TrainingError
from onward.training.callbacks import Status
from onward.training.run import Run

pytestmark = pytest.mark.usefixtures("folder")

SETTINGS: dict[str, Any] = {"epochs": 2, "batch_size": 16, "validation": 0.5, **RECIPE, **QUIET}  # 3 steps in an epoch


class Told(onward.Callback):
    """Remembers what it is told, and does something at one place."""

    def __init__(self, where: tuple[str, int] | None = None, action: Any = None):
        self.seen: list[tuple[str, int]] = []
        self.last: Status | None = None
        self._where, self._action = where, action

    def _hear(self, hook: str, status: Status) -> None:
        self.seen.append((hook, status.step))
        self.last = status
        if self.seen[-1] == self._where:
            self._action(status)

    def start(self, status: Status) -> None:
        self._hear("start", status)

    def step(self, status: Status) -> None:
        self._hear("step", status)

    def epoch(self, status: Status) -> None:
        self._hear("epoch", status)

    def end(self, status: Status) -> None:
        self._hear("end", status)
        assert status.run.read_progress()["step"] == status.step and len(status.run.load_last().graph)  # all is saved


def train(run: str, *callbacks: onward.Callback) -> Any:
    return onward.train("digits.onnx", "digits.npz", run=run, callbacks=callbacks, **SETTINGS)


def assert_same(run: str, other: str) -> None:
    a, b = state(Run(run)), state(Run(other))
    assert all(np.array_equal(a[name], b[name]) for name in b)


WHOLE = [("start", 0), *(("step", i) for i in (1, 2, 3)), ("epoch", 3), *(("step", i) for i in (4, 5, 6)), ("epoch", 6)]


def test_what_they_are_told() -> None:
    losses, told = [], Told()

    class Losses(onward.Callback):
        def step(self, status: Status) -> None:
            losses.append((status.loss, status.metrics["lr"], len(status.batches[0]["labels"])))

        def epoch(self, status: Status) -> None:
            status.log("mine", step=status.step, results=status.results, weight=status.engine.state()["fc2.bias"][0])

    run = train("run", told, Losses())
    assert told.seen == [*WHOLE, ("end", 6)] and told.last is not None and told.last.reason == "finished"
    assert losses == [(event["loss"], event["lr"], 16) for event in run.read_log() if event["event"] == "step"]
    mine = [event for event in run.read_log() if event["event"] == "mine"]
    assert [event["step"] for event in mine] == [3, 6] and mine[-1]["results"] == run.read_results()
    assert mine[-1]["weight"] == pytest.approx(state(run)["fc2.bias"][0], rel=1e-6)
    onward.report(run.path)  # which passes over events that it does not know


@pytest.mark.parametrize("where", [("start", 0), ("step", 2), ("epoch", 3)])
def test_one_that_stops(where: tuple[str, int]) -> None:
    told = Told(where, lambda status: status.stop())
    run = train("run", told)
    assert told.seen == [*WHOLE[: WHOLE.index(where) + 1], ("end", where[1])]
    assert run.read_log()[-1]["reason"] == "stopped" and run.read_progress()["step"] == where[1]
    train("whole")
    again = Told()
    onward.resume(run, callbacks=[again], quiet=True)
    assert again.seen[0] == ("start", where[1]) and again.seen[-1] == ("end", 6)
    assert_same("run", "whole")


def fail(status: Status) -> None:
    raise ValueError("no idea")


@pytest.mark.parametrize("where", [("step", 2), ("epoch", 3), ("end", 6)])
def test_one_that_fails_is_named_and_the_run_goes_on(where: tuple[str, int]) -> None:
    told, other = Told(where, fail), Told()
    with pytest.raises(
        TrainingError, match=r"callback `Told` failed in `.*`, after step .*: ValueError: no idea"
    ) as error:
        train("run", told, other)
    assert isinstance(error.value.__cause__, ValueError) and "onward.resume('run', callbacks=" in (
        error.value.hint or ""
    )
    assert other.seen[-1] == ("end", where[1])
    train("whole")
    onward.resume("run", quiet=True)
    assert_same("run", "whole")


def test_one_that_fails_at_once_leaves_nothing_behind() -> None:
    with pytest.raises(TrainingError, match="`Told` failed in `start`"):
        train("run", Told(("start", 0), fail))
    assert not Path("run").exists()


def test_what_is_no_callback_is_refused() -> None:
    for wrong in (print, Told):
        with pytest.raises(ArgumentError, match="callbacks"):
            onward.train("digits.onnx", "digits.npz", run="run", callbacks=[wrong], **SETTINGS)  # type: ignore[list-item]
    assert not Path("run").exists()


def test_statistics_are_optional() -> None:
    with_them = {event["event"] for event in train("run").log}
    without = onward.train("digits.onnx", "digits.npz", run="other", statistics=False, **SETTINGS)
    assert with_them - {event["event"] for event in without.log} == {"gradients", "weights"}
    assert_same("run", "other")


def test_a_run_without_gradients_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saturated = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 13]>
        g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {900.0, 900.0}> { z = MatMul(x, w) y = Sigmoid(z) }""")
    for name, scale in {"saturated": 1, "alive": 1e-3}.items():
        data = {"x": np.full((4, 2), scale, np.float32), "target": np.zeros((4, 1), np.float32)}
        run = onward.train(saturated, data, loss="bce", epochs=2, run=tmp_path / name)
        notes = [event["text"] for event in run.read_log() if event["event"] == "note"]
        said = [note for note in notes if note.startswith("all gradients of step 1 are 0")]
        assert len(said) == (name == "saturated") == capsys.readouterr().err.count("all gradients of step 1")
