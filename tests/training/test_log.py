"""What a run writes while it trains: its log, event files for TensorBoard, and what it shows."""

from __future__ import annotations

import io
import json
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from marks import needs
from rich.console import Console

from onward.training.log import Log, read_log
from onward.training.progress import Progress, duration
from onward.training.tensorboard import EventWriter

# ---- the log ---------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    events = [
        {"event": "start", "model": "a.onnx", "recipe": {"loss": "mse", "scales": [1, 2.5, None, True]}},
        {"event": "step", "step": 1, "loss": 0.25},
        {"event": "end", "reason": "é\u2028\n😀"},
    ]
    with Log(tmp_path / "log.jsonl") as log:
        for event in events:
            log.write(str(event["event"]), **{key: value for key, value in event.items() if key != "event"})
    assert list(read_log(tmp_path / "log.jsonl")) == events
    assert len((tmp_path / "log.jsonl").read_bytes().splitlines()) == 3


def test_lines_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with Log(path) as log:
        log.write("step", loss=math.nan, norms={"a": np.float32(np.inf), "b": [-math.inf, np.array([1.0, np.nan])]})
        log.write("step", loss=np.float32(0.1), step=np.int64(3), counts=np.arange(3), path=Path("x"))

    def no_constants(name: str) -> None:
        raise AssertionError(name)

    lines = [json.loads(line, parse_constant=no_constants) for line in path.read_text().splitlines()]
    assert lines[0] == {"event": "step", "loss": "NaN", "norms": {"a": "Infinity", "b": ["-Infinity", [1.0, "NaN"]]}}
    assert lines[1] == {"event": "step", "loss": 0.1, "step": 3, "counts": [0, 1, 2], "path": "x"}
    first, _ = read_log(path)
    assert math.isnan(first["loss"]) and first["norms"]["a"] == math.inf and first["norms"]["b"][0] == -math.inf


def test_a_log_that_was_cut_anywhere_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with Log(path) as log:
        for i in range(4):
            log.write("step", step=i)
    whole = path.read_bytes()
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        with Log(path) as log:
            log.write("resume", step=9)
        steps = [event["step"] for event in read_log(path)]
        assert steps == [*range(whole[:end].count(b"}")), 9]


def test_a_damaged_line_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"event": "start"}\n\xff\x00{]\n[1]\n' + b"[" * 50_000 + b'\n{"event": "end"}\n')
    assert [event["event"] for event in read_log(path)] == ["start", "end"]


def test_steps_wait_but_other_events_do_not(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with Log(path) as log:
        log.write("step", step=1)
        assert not list(read_log(path))
        log.write("save", step=1)
        assert len(list(read_log(path))) == 2
        log.write("step", step=2)
        time.sleep(1.1)
        log.write("step", step=3)
        assert len(list(read_log(path))) == 4


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def read_events(folder: Path) -> list[Any]:
    """What TensorFlow reads, checksums included."""
    import tensorflow as tf

    (path,) = folder.glob("events.out.tfevents.*")
    return list(tf.compat.v1.train.summary_iterator(str(path)))


@needs("tensorflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorflow_reads_scalars_and_histograms(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=1000)
    counts, edges = np.histogram(values, 30)
    with EventWriter(tmp_path) as writer:
        writer.scalars(1, {"loss/train": 0.5, "lr": np.float32(1e-3), "été": math.inf})
        writer.scalars(300_000_000_000, {"loss/train": math.nan})
        writer.histogram(7, "fc1.weight", edges, counts)
    version, first, second, third = read_events(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert abs(first.wall_time - time.time()) < 60
    assert {v.tag: v.simple_value for v in first.summary.value} == {
        "loss/train": 0.5,
        "lr": np.float32(1e-3),
        "été": math.inf,
    }
    assert second.step == 300_000_000_000 and math.isnan(second.summary.value[0].simple_value)
    histogram = third.summary.value[0].histo
    assert (third.step, third.summary.value[0].tag) == (7, "fc1.weight")
    assert list(histogram.bucket_limit) == edges[1:].tolist() and list(histogram.bucket) == counts.tolist()
    assert (histogram.min, histogram.max, histogram.num) == (values.min(), values.max(), 1000)
    assert histogram.sum == pytest.approx(values.sum(), abs=20)
    assert histogram.sum_squares == pytest.approx((values**2).sum(), rel=0.02)


@needs("tensorflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_event_files_go_on(tmp_path: Path) -> None:
    for step in range(1, 4):
        with EventWriter(tmp_path) as writer:
            writer.scalars(step, {"loss": step})
    version, *events = read_events(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert [(event.step, event.summary.value[0].simple_value) for event in events] == [(1, 1), (2, 2), (3, 3)]


# ---- progress --------------------------------------------------------------------------------------------------------


def shown(terminal: bool, **options: Any) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120, color_system=None)
    return Progress(3, options.pop("steps", 10), console=console, **options), stream


def step(progress: Progress, loss: float = 0.5, samples: int = 32) -> None:
    progress.step(SimpleNamespace(loss=loss, samples=samples))  # type: ignore[arg-type] # as much of a status as it reads


def epoch(progress: Progress, mean: float, /, **results: float) -> None:
    progress.epoch(SimpleNamespace(loss=mean, results=results))  # type: ignore[arg-type]


def train(progress: Progress, epochs: int = 3, steps: int = 10, pause: float = 0.0) -> None:
    with progress:
        for number in range(epochs):
            for _ in range(steps):
                time.sleep(pause)
                step(progress)
            epoch(progress, 0.45, loss=0.25, accuracy=0.9 + number / 100)


def test_plain_lines_are_one_per_epoch() -> None:
    progress, stream = shown(terminal=False)
    train(progress)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3 and "\x1b" not in stream.getvalue()
    assert re.fullmatch(r"epoch 3/3  loss 0\.45  validation loss 0\.25  accuracy 0\.92  0\.\d s", lines[-1])


def test_plain_lines_come_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(np.arange(0, 1000, 0.5))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    progress, stream = shown(terminal=False, steps=40)
    for _ in range(21):
        step(progress)
    lines = stream.getvalue().splitlines()
    assert lines == [
        "epoch 1/3  step 10/120  loss 0.5  64 samples/s  0:55 left",
        "epoch 1/3  step 20/120  loss 0.5  64 samples/s  0:50 left",
    ]


def test_a_bar_on_a_terminal() -> None:
    progress, stream = shown(terminal=True)
    train(progress, pause=0.03)
    text = stream.getvalue()
    assert re.search(r"epoch 2/3 ━+.* +loss 0\.5  accuracy 0\.9  [\d,]+ samples/s  \d\.\d s left", text)
    assert 3 < text.count("samples/s") < 20  # drawn a few times, not at each step
    assert len(re.findall(r"epoch \d/3  loss 0\.45  validation loss 0\.25", text)) == 3
    assert text.endswith("\x1b[1A\x1b[2K")  # and it is gone at the end


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    progress, stream = shown(terminal=True, quiet=True)
    train(progress)
    train(Progress(3, 10, quiet=True))
    assert stream.getvalue() == "" and capsys.readouterr() == ("", "")


def test_a_run_that_goes_on_counts_from_there() -> None:
    progress, stream = shown(terminal=False, done=15, epoch=1, batch=5)
    for _ in range(5):
        step(progress)
    epoch(progress, 0.25)
    assert stream.getvalue().startswith("epoch 2/3  loss 0.25  ")


def test_the_first_epoch_tells_how_long_epochs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(np.arange(0, 1000, 1.0))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    progress, stream = shown(terminal=False, steps=None)
    train(progress, epochs=2, steps=6)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "epoch 1/3  step 5  loss 0.5  32 samples/s"
    assert lines[2] == "epoch 2/3  step 11/18  loss 0.5  accuracy 0.9  32 samples/s  7.6 s left"


def test_losses_that_are_no_numbers_are_not_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(np.arange(0, 1000, 1.3))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    progress, stream = shown(terminal=False)
    for loss in (1.0, math.nan, math.inf, 2.0):
        step(progress, loss, 1)
    assert "loss 1.505" in stream.getvalue()


def test_a_step_costs_next_to_nothing() -> None:
    progress, _ = shown(terminal=True, steps=200_000)
    start = time.process_time()
    with progress:
        for _ in range(200_000):
            step(progress)
    assert (time.process_time() - start) / 200_000 < 20e-6


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (10, "0:10"), (65, "1:05"), (3599.6, "1:00:00"), (7800, "2:10:00")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
