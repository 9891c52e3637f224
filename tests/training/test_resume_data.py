"""A resumed run recognizes its data: what changed is refused and named, the same content is accepted wherever it is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import failed, run
from marks import needs
from models import digits_mlp, small_cnn
from runs import QUIET, Arrays, digits

import onward
from onward.errors import DataError
from onward.training.data import identity
from onward.training.report.history import History
from onward.training.run import Run

SETTINGS: dict[str, Any] = {**QUIET, "loss": "cross_entropy", "batch_size": 16, "statistics": False}
ROWS = 48


# ---- sources ---------------------------------------------------------------------------------------------------------


def as_npz(data: Arrays, path: Path) -> Path:
    np.savez(path.with_suffix(".npz"), **data)
    return path.with_suffix(".npz")


def as_parquet(data: Arrays, path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = {name: pa.array(list(array)) for name, array in data.items()}
    pq.write_table(pa.table(flat), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def as_csv(data: Arrays, path: Path) -> Path:
    image, labels = (data[name] for name in data)
    first, last = data
    names = [*(f"{first}{at}" for at in range(image.shape[1])), last]
    lines = [",".join(map(repr, [*map(float, row), *[label.item()]])) for row, label in zip(image, labels, strict=True)]
    path.with_suffix(".csv").write_text("\n".join([",".join(names), *lines]))
    return path.with_suffix(".csv")


def as_folder(data: Arrays, path: Path) -> Path:
    from PIL import Image

    image, labels = (data[name] for name in data)
    shutil.rmtree(path, ignore_errors=True)
    for at, (pixels, label) in enumerate(zip(image, labels, strict=True)):
        file = path / f"class{int(label)}" / f"{at:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels.reshape(8, 8) * 40 + 128).clip(0, 255).astype(np.uint8)).save(file)
    return path


SOURCES: dict[str, Callable[[Arrays, Path], Path]] = {
    "npz": as_npz,
    "csv": as_csv,
    "folder": as_folder,
    "parquet": as_parquet,
}


def original() -> Arrays:
    data = digits(ROWS)
    return {**data, "labels": data["labels"] % 3}


def other_value(data: Arrays) -> Arrays:
    image = data["image"].copy()
    image[3, 5] += 1
    return {**data, "image": image}


CHANGES: dict[str, tuple[Callable[[Arrays], Arrays], str]] = {
    "fewer rows": (lambda data: {name: array[:30] for name, array in data.items()}, "30 rows, not 48"),
    "more rows": (lambda data: {name: np.concatenate([a, a[:4]]) for name, a in data.items()}, "52 rows, not 48"),
    "other values": (other_value, "other values in `image"),
    "other order": (lambda data: {name: array[::-1] for name, array in data.items()}, "other values in `image"),
    "other type": (lambda data: {**data, "image": data["image"].astype(np.float64)}, "float64"),
    "renamed column": (lambda data: {"picture": data["image"], "labels": data["labels"]}, "no column `image"),
    "same content elsewhere": (dict, ""),
    "touched": (dict, ""),
}
NOT_IN = {
    ("csv", "other type"),  # text has none
    ("csv", "renamed column"),  # which `columns` names, so that it is refused in any case
    ("folder", "other type"),
    ("folder", "renamed column"),
    ("folder", "other order"),  # that of the names of files
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Run, Path]]:
    """A run of an epoch for each source, trained when it is first wanted."""
    started: dict[str, tuple[Run, Path]] = {}

    def of(source: str) -> tuple[Run, Path]:
        if source not in started:
            folder = tmp_path_factory.mktemp(source)
            is_folder = source == "folder"
            onnx.save(small_cnn() if is_folder else digits_mlp(), folder / "model.onnx")
            data = SOURCES[source](original(), folder / "data")
            columns = {"image": "image*"} if source == "csv" else {}
            run = onward.train(
                folder / "model.onnx", str(data), run=folder / "run", columns=columns, validation=0.25, **SETTINGS
            )
            started[source] = run, data
        return started[source]

    return of


def cases() -> Iterator[Any]:
    """All changes of one source, and of the others one that is refused and one that is not."""
    for source in SOURCES:
        for change in CHANGES:
            if (source, change) not in NOT_IN:
                marks = [needs("pyarrow")] if source == "parquet" else []
                is_quick = source == "npz" or change in ("other values", "touched")
                yield pytest.param(source, change, marks=[*marks, *([] if is_quick else [pytest.mark.slow])])


@pytest.mark.parametrize(("source", "change"), list(cases()))
def test_resume(source: str, change: str, runs: Any, tmp_path: Path) -> None:
    begun, data = runs(source)
    run = Run(shutil.copytree(begun.path, tmp_path / "run"))
    make, told = CHANGES[change]
    if change == "touched":
        for file in [data, *data.rglob("*")]:
            os.utime(file, (1, 1))
        onward.resume(run, epochs=2, quiet=True)
    else:
        changed = str(SOURCES[source](make(original()), tmp_path / "changed"))
        if told:
            before = (run.path / "config.yaml").read_text()
            with pytest.raises(DataError) as caught:
                onward.resume(run, changed, epochs=2, quiet=True)
            assert told in str(caught.value) and "--data-changed" in (caught.value.hint or "")
            assert (run.path / "config.yaml").read_text() == before  # nothing was written
        onward.resume(run, changed, data_changed=bool(told), epochs=2, quiet=True)
    assert run.read_progress()["epoch"] == 2 and run.read_log()[-1]["reason"] == "finished"
    notes = [event["text"] for event in run.read_log() if event["event"] == "note"]
    assert bool(told) == any("have changed" in note for note in notes)


# ---- counting --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(digits_mlp(), "digits.onnx")
    np.savez("digits.npz", **digits(96))
    return tmp_path


def test_epochs_are_counted_with_the_new_data(folder: Path) -> None:
    """6 steps make an epoch, then 3: a run that is stopped within its second epoch begins that again."""
    stop = type("Stop", (onward.Callback,), {"step": lambda self, status: status.step == 8 and status.stop()})
    started = onward.train("digits.onnx", "digits.npz", run="run", epochs=4, callbacks=[stop()], **SETTINGS)
    assert (started.progress["epoch"], started.progress["batch"]) == (1, 2)
    np.savez("digits.npz", **digits(48))
    error, hint = failed("train", "--resume", "run")
    assert "48 rows, not 96" in error and "--data-changed" in hint
    told = run("train", "--resume", "run", "--data-changed").stderr
    assert "epoch 2 starts over" in told and "epoch 4/4" in told and "epoch 5" not in told
    assert started.progress["step"] == 8 + 3 * 3 and started.progress["epoch"] == 4
    history = History().read(started.log)
    assert history.epochs_at(history.step) == 4 and history.epochs_at(6) == 1 and history.recounts == [(8, 1, 3)]


def test_the_best_result_was_on_other_data(folder: Path) -> None:
    np.savez("held-out.npz", **digits(32, seed=1))
    started = onward.train("digits.onnx", "digits.npz", validation="held-out.npz", run="run", **SETTINGS)
    np.savez("held-out.npz", **digits(32, seed=2))
    with pytest.raises(DataError, match="the validation data have changed: other values in `image`"):
        onward.resume(started, epochs=2, quiet=True)
    ended = onward.resume(started, epochs=2, data_changed=True, quiet=True)
    assert ended.read_progress()["best"] == ended.read_results()["accuracy"]


# ---- what cannot be compared -----------------------------------------------------------------------------------------


def notes_of(run: Run) -> list[str]:
    return [event["text"] for event in run.read_log() if event["event"] == "note"]


class Drawn:
    """A data set that draws its samples anew each time, as those do that augment."""

    def __init__(self, rows: int):
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if index >= self.rows:
            raise IndexError
        return {"image": np.random.default_rng().normal(size=64).astype(np.float32), "labels": np.int64(index % 10)}


def test_of_objects_whose_code_makes_the_values_only_types_are_compared(folder: Path) -> None:
    started = onward.train("digits.onnx", Drawn(32), run="drawn", **SETTINGS)
    onward.resume(started, Drawn(32), epochs=2, quiet=True)
    assert "the training data: the values were not compared, only columns and types" in notes_of(started)
    with pytest.raises(DataError, match="31 rows, not 32"):
        onward.resume(started, Drawn(31), epochs=3, quiet=True)

    def batches() -> Iterator[Arrays]:
        yield digits(16)

    streamed = onward.train("digits.onnx", batches, run="streamed", **SETTINGS)
    onward.resume(streamed, batches, epochs=2, quiet=True)
    assert "the training data: the values were not compared, only columns and types" in notes_of(streamed)


def test_of_large_data_some_rows_are_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where file times differ, it is said that not all rows were compared."""
    monkeypatch.setattr(identity, "_MOST", 20 * 264)
    started = onward.train("digits.onnx", "digits.npz", run="run", **SETTINGS)
    onward.resume(started, epochs=2, quiet=True)
    assert not notes_of(started)
    os.utime("digits.npz", (1, 1))
    onward.resume(started, epochs=3, quiet=True)
    assert notes_of(started) == ["the training data: 20 of 96 rows were compared"]
    changed = digits(96)
    changed["image"][0] = 0
    np.savez("digits.npz", **changed)
    with pytest.raises(DataError, match="other values in `image`"):
        onward.resume(started, epochs=4, quiet=True)


def test_a_run_that_does_not_know_its_data_is_resumed_with_a_remark(folder: Path) -> None:
    started = onward.train("digits.onnx", "digits.npz", run="run", **SETTINGS)
    model = started.model
    progress = model.step().metadata["train.progress"]
    model.step().metadata["train.progress"] = progress[: progress.index(', "data"')] + "}"  # as it was before
    model.save(started.path / "training.onnx")
    onward.resume(started, epochs=2, quiet=True)
    notes = notes_of(started)
    assert any("the run does not record its data" in note for note in notes)
    assert any("has no checksum" in note for note in notes)  # Onward saved it, but not as a run
